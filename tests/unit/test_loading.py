"""Modules that are slow to import are imported only by the few processes that need them."""

from __future__ import annotations

import subprocess
import sys

HTTP = {"httpx2", "starlette", "uvicorn"}
SELDOM = {"alembic", "openai", "pypi_simple", "reasoning_gym", "IPython", "huggingface_hub"}


def loaded(modules: str, names: set[str]) -> list[str]:
    code = f"import sys, {modules}; print(*sorted({names} & sys.modules.keys()))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_workers_and_commands_load_nothing_that_few_of_them_need() -> None:
    assert loaded("farm.cli.main, workers.node.supervisor, workers.queue.tasks", SELDOM) == []


def test_a_worker_process_loads_no_command_line_of_celerys() -> None:
    command = [sys.executable, "-X", "importtime", "-c", "import workers.queue.worker_fork_server"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "workers.queue.tasks" in modules
    assert modules & {"celery.bin.celery", "flower", "prompt_toolkit"} == set()


def test_who_does_not_speak_http_loads_nothing_of_it() -> None:
    assert loaded("farm.cli.main", HTTP) == []


def test_options_of_a_node_are_checked_without_the_node() -> None:
    assert loaded("workers.node.command", {"celery", "numpy", "pydantic", "redis", "sqlalchemy"}) == []
