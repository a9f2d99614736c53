"""A base tree of Debian for the tests in this folder: `make test-installers`. Without FARM_TEST_INSTALLERS, the folder
that has it, none of them is collected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from farm.settings import settings
from tests.contract.conftest import farm_folder, provider, run, sandbox_settings, start
from workers.sandboxes.images.image_aliases import set_alias
from workers.sandboxes.sandbox_user import give

__all__ = ["farm_folder", "provider", "run", "sandbox_settings", "start"]

if not os.environ.get("FARM_TEST_INSTALLERS"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def debian(sandbox_settings: Path) -> Iterator[str]:
    """The name of the base tree, and a farm whose builds have the network."""
    base = Path(os.environ["FARM_TEST_INSTALLERS"], "bookworm")
    give(base)
    set_alias("debian:bookworm", str(base))
    os.environ["FARM_BUILD_NETWORK"] = "1"
    settings.cache_clear()
    yield "debian:bookworm"
    del os.environ["FARM_BUILD_NETWORK"]
    settings.cache_clear()
