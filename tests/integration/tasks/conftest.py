"""The farm's folders that Harbor tasks are run in by tests, and base images for the names that the tasks give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import absent
from tests.contract.sandboxes.sandbox_kinds import farm_in
from tests.services.farms import farm_folder
from tests.services.task_images import task_base
from workers.registry import sandbox as provider
from workers.sandboxes.images.image_aliases import set_alias
from workers.sandboxes.remove_tree import remove


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A farm's folders, in which the base images of the samples have names."""
    if missing := provider("namespace").missing():
        absent(missing)
    base = tmp_path_factory.mktemp("base")
    base.chmod(0o755)
    with farm_folder() as folder, farm_in(folder):
        task_base(base)
        for name in ("debian:bookworm-slim", "python:3.11-slim"):
            set_alias(name, str(base))
        yield folder
        remove(folder)
