"""Base trees of Debian and Ubuntu for the tests in this folder: `make test-installers`. Without FARM_TEST_INSTALLERS,
the folder that has them, none of them is collected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farm.settings import settings
from testkit.scratch_folder import sandbox_config
from tests.contract.conftest import _farm_folder, provider, run, sandbox_settings, start
from workers.sandboxes.images.image import set_alias

__all__ = ["_farm_folder", "provider", "run", "sandbox_settings", "start"]

if not os.environ.get("FARM_TEST_INSTALLERS"):
    collect_ignore_glob = ["test_*.py"]


@contextmanager
def base_alias(name: str) -> Iterator[str]:
    """Yield the image name of a base tree, whose files belong to root; meanwhile builds have the network."""
    folder = Path(os.environ["FARM_TEST_INSTALLERS"], name)
    if not folder.is_dir():
        pytest.skip(f"there is no base of {name}: set UBUNTU_ARCHIVE for `make test-installers`")
    image = f"base:{name}"
    set_alias(sandbox_config(), image, str(folder))
    os.environ["FARM_BUILD_NETWORK"] = "1"
    settings.cache_clear()
    yield image
    del os.environ["FARM_BUILD_NETWORK"]
    settings.cache_clear()


@pytest.fixture(scope="module", params=["bookworm", "noble"])
def base(request: pytest.FixtureRequest, sandbox_settings: None) -> Iterator[str]:
    """The image name of a Debian or Ubuntu base."""
    with base_alias(request.param) as image:
        yield image
