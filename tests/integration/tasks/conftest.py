"""The farm's folders that Harbor tasks are run in by tests, and base images for the names that the tasks give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.tasks.task_scores import farm_with_bases


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A farm's folders, in which the base images of the samples have names."""
    with farm_with_bases(tmp_path_factory.mktemp("base")) as folder:
        yield folder
