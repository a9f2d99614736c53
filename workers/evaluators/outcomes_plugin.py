"""A pytest plugin that writes each test's outcome; sent into sandboxes as text, it imports nothing of the farm.

A test passed if its call passed and neither its set-up nor its tear-down failed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_PATH = Path(os.environ.pop("FARM_OUTCOMES", os.devnull))


def pytest_runtest_logreport(report: Any) -> None:
    """One JSON line for each phase: `[node id, phase, outcome]`."""
    with _PATH.open("a", encoding="utf-8") as file:
        file.write(json.dumps([report.nodeid, report.when, report.outcome]) + "\n")
