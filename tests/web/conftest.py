"""A browser for the tests in this folder: `make test-web`. Without FARM_WEB_PACKAGES none of them is collected.

Playwright controls Debian's Chromium; axe-core checks the accessibility of each view.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest

if not os.environ.get("FARM_WEB_PACKAGES"):
    collect_ignore_glob = ["test_*.py"]
else:
    sys.path.append(os.environ["FARM_WEB_PACKAGES"])

_OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
_MORE = ("--disable-component-update", "--disable-sync")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A running headless Chromium."""
    from playwright.sync_api import sync_playwright

    names = (os.environ.get("FARM_BROWSER", ""), "chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, filter(None, names))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*_OPTIONS, *_MORE])
        yield browser
        browser.close()
