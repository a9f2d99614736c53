"""The head of a cluster: nodes wait for it and follow it to a new address; killing it costs no rollout an attempt."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import farm
from farm.embedded.child_process import ChildProcess
from farm.launch.head import postgres_binaries
from farm.launch.shared_address import read_address
from tests.acceptance.test_drain import PATIENT, family
from tests.conftest import absent
from tests.services.farms import QUICK, farm_folder, left_of, until
from tests.services.preloaded import program

NAP = {"data_source": "noop", "fields": {"seconds": 1.0}}
SLOTS = ["--init", "4", "--run", "4", "--eval", "4", "--grace", "0"]


@pytest.fixture
def folder() -> Iterator[Path]:
    if postgres_binaries() is None:
        absent("no Postgres: install the pgserver wheel (make venv) or Debian's postgresql")
    with farm_folder() as made:
        yield made


def env_of(folder: Path, **more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("FARM_")} | QUICK | PATIENT
    return env | {"FARM_SCRATCH": str(folder / "scratch")} | more


@contextmanager
def running(process: ChildProcess) -> Iterator[ChildProcess]:
    try:
        yield process
    finally:
        process.terminate()
        process.end(600)


@contextmanager
def head(folder: Path, name: str) -> Iterator[ChildProcess]:
    words = [sys.executable, "-m", "farm.cli.main", "head", "--dir", str(folder / "shared"), "--no-flower", "--standby"]
    with running(ChildProcess(words, env=env_of(folder), log=folder / f"{name}.log")) as process:
        yield process


@contextmanager
def node(folder: Path, name: str, *more: str) -> Iterator[ChildProcess]:
    words = ["--at", str(folder / "shared"), *SLOTS, *more]
    with running(program("workers.node", words, env_of(folder, FARM_NODE=name), folder / f"{name}.log")) as process:
        yield process


def leads(folder: Path, process: ChildProcess) -> bool:
    with suppress(OSError, ValueError):
        written = json.loads((folder / "shared" / "head.json").read_text())
        address = read_address(folder / "shared")
        return written["process"]["pid"] == process.pid and address is not None and bool(address.head)
    return False


def log_of(folder: Path, name: str) -> str:
    with suppress(OSError):
        return (folder / f"{name}.log").read_text()
    return ""


def test_killed_head_is_replaced_without_losing_attempts(folder: Path) -> None:
    shared = folder / "shared"
    with node(folder, "early"):
        until(lambda: "waiting for a head in" in log_of(folder, "early"), "the node waits")
        with head(folder, "first") as first:
            until(lambda: leads(folder, first), lambda: f"there is a head: {log_of(folder, 'first')}", 600)
            for file in ("address.json", "api_key", "secret_key", "password", "head.json"):
                assert stat.S_IMODE((shared / file).stat().st_mode) == 0o600
            words = [sys.executable, "-m", "farm.cli.main", "head", "--dir", str(shared)]
            another = subprocess.run(words, env=env_of(folder), capture_output=True, text=True, timeout=600)
            assert another.returncode == 1
            assert another.stderr.startswith(f"Error: Conflict: a farm runs in {shared} already, on ")
            with head(folder, "second") as second:
                with farm.connect(shared) as client:
                    batch_id = client.submit({"instances": [NAP] * 24})
                    until(lambda: client.status(batch_id).n_finished >= 2, "it runs", 600)
                os.kill(first.pid, signal.SIGKILL)
                until(lambda: leads(folder, second), lambda: f"another leads: {log_of(folder, 'second')}", 600)
                with farm.connect(shared) as client:
                    rollouts = client.collect(batch_id, timeout_s=600)
                assert {(each.reward is not None, each.attempt, each.n_failures) for each in rollouts} == {(True, 1, 0)}
    assert left_of(folder) == []


def test_first_node_serves_as_head_and_requeues_before_it_ends(folder: Path) -> None:
    shared = folder / "shared"
    with node(folder, "alone", "--head-on-first") as alone:
        until(lambda: "is ready" in log_of(folder, "alone"), lambda: log_of(folder, "alone"), 600)
        with farm.connect(shared) as client:
            batch_id = client.submit({"instances": [{"data_source": "noop", "fields": {"seconds": 600.0}}] * 4})
            until(lambda: client.status(batch_id).stages[farm.Stage.RUN][farm.State.ACTIVE] == 4, "they run", 600)
        before = read_address(shared)
        os.kill(json.loads((shared / "head.json").read_text())["process"]["pid"], signal.SIGKILL)

        def led_again() -> bool:
            now = read_address(shared)
            return before is not None and now is not None and now.head not in ("", before.head)

        until(led_again, lambda: f"its head is started again: {log_of(folder, 'alone')}", 600)
        after = read_address(shared)
        assert before is not None
        assert after is not None
        assert after.own == before.own == ("store", "broker"), "it serves them itself, as before"
        with farm.connect(shared) as client:
            assert client.status(batch_id).stages[farm.Stage.RUN][farm.State.ACTIVE] == 4
        for pid in family(alone.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert alone.process.wait(600) == 0, log_of(folder, "alone")
    assert left_of(folder) == []
    # requeued rollouts wait for the next node
    with head(folder, "next") as following:
        until(lambda: leads(folder, following), lambda: f"there is a head: {log_of(folder, 'next')}", 600)
        with farm.connect(folder / "shared") as client:
            left = client.rollouts(batch_id)
        assert {(each.state, each.node, each.n_failures) for each in left} == {(farm.State.QUEUED, None, 0)}
    assert left_of(folder) == []
