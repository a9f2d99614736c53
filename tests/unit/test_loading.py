"""What takes long to load is loaded by the few processes that need it."""

from __future__ import annotations

import subprocess
import sys

HTTP = {"httpx2", "starlette", "uvicorn"}
SELDOM = {"alembic", "openai", "pypi_simple", "reasoning_gym", "IPython", "huggingface_hub"}


def loaded(modules: str, names: set[str]) -> list[str]:
    code = f"import sys, {modules}; print(*sorted({names} & sys.modules.keys()))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_workers_and_commands_load_nothing_that_few_of_them_need() -> None:
    assert loaded("farm.cli, workers.node, workers.tasks", SELDOM) == []


def test_who_does_not_speak_http_loads_nothing_of_it() -> None:
    assert loaded("farm.cli", HTTP) == []
