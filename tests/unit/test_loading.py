"""What takes long to load is loaded by the few processes that need it."""

from __future__ import annotations

import subprocess
import sys

SELDOM = {"alembic", "openai", "pypi_simple", "reasoning_gym", "IPython", "huggingface_hub"}


def test_workers_and_commands_load_nothing_that_few_of_them_need() -> None:
    code = f"import sys, farm.cli, workers.node, workers.tasks; print(*sorted({SELDOM} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []
