"""Modules that are slow to import are imported only by the few processes that need them."""

from __future__ import annotations

import subprocess
import sys

HTTP = {"httpx2", "starlette", "uvicorn"}
SELDOM = {"alembic", "openai", "pypi_simple", "reasoning_gym", "IPython", "huggingface_hub"}


def loaded(modules: str, names: set[str]) -> list[str]:
    code = f"import sys, {modules}; print(*sorted({names} & sys.modules.keys()))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_workers_and_commands_do_not_import_rarely_needed_modules() -> None:
    assert loaded("farm.cli.main, workers.node.supervisor, workers.queue.tasks", SELDOM) == []


def test_worker_process_does_not_import_the_command_line_of_celery() -> None:
    command = [sys.executable, "-X", "importtime", "-c", "import workers.queue.worker_fork_server"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "workers.queue.tasks" in modules
    assert modules & {"celery.bin.celery", "flower", "prompt_toolkit"} == set()


def test_command_line_without_http_imports_no_http_client() -> None:
    assert loaded("farm.cli.main", HTTP) == []


def test_options_of_a_node_are_checked_without_importing_the_node() -> None:
    assert loaded("workers.node.command", {"celery", "numpy", "pydantic", "redis", "sqlalchemy"}) == []
