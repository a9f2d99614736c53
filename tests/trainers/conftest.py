"""Tests with real trainers, in an environment of their own. Without FARM_TRAINERS_PYTHON none of them is collected."""

from __future__ import annotations

import os

if not os.environ.get("FARM_TRAINERS_PYTHON"):
    collect_ignore_glob = ["test_*.py"]
