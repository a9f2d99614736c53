"""The farm's folders for Harbor tasks in tests, and base images under the names that the tasks use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.tasks.task_scores import farm_with_bases


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a farm's folders, in which the samples' base images exist by name."""
    with farm_with_bases(tmp_path_factory.mktemp("base")) as folder:
        yield folder
