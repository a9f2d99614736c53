"""The fork server of a node's workers: how they are named, end, and are restarted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from farm.store import migrations
from farm.store.database import Store
from tests.services.farms import processes_of, until
from workers.node.pools import ForkedProcess, WorkerForkServer
from workers.process.supervision import FINISH, ready_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node")


@pytest.fixture(scope="module")
def server(folder: Path, redis_url: str) -> Iterator[WorkerForkServer]:
    """Yield a server for all tests, as each takes a second of processor time to start."""
    store = Store(f"sqlite:///{folder / 'farm.db'}")
    migrations.migrate(store)
    store.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARM_STORE_URL", store.url)
        patch.setenv("FARM_BROKER_URL", redis_url)
        patch.setenv("FARM_SCRATCH", str(folder))
        lifeline = os.pipe()
        fork_server = WorkerForkServer(lifeline)
        yield fork_server
    fork_server.close()
    fork_server.cut_lifeline()
    os.close(lifeline[0])
    until(lambda: not processes_of(folder), lambda: f"all have ended: {processes_of(folder)}")


def started(server: WorkerForkServer, folder: Path, **env: str) -> ForkedProcess:
    names = {"FARM_NODE": "here", "FARM_POOL": "run"}
    return server.start("run@here", 2, names | env, folder / "logs" / "run.log")


def ready(worker: ForkedProcess, folder: Path) -> ForkedProcess:
    until(lambda: ready_file(folder, worker.pid).exists(), "the worker consumes its queue")
    return worker


def server_of(folder: Path) -> int:
    return next(int(line.partition(":")[0]) for line in processes_of(folder) if "fork-server" in line)


def test_worker_has_its_command_line_and_ends_by_its_signal(server: WorkerForkServer, folder: Path) -> None:
    worker = ready(started(server, folder), folder)
    words = Path(f"/proc/{worker.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert words[1:] == [b"-m", b"workers.queue", b"-n", b"run@here", b"-c", b"2"]
    worker.send(FINISH)
    assert worker.end(60.0)
    assert worker.returncode == 0


def test_killed_worker_is_detected_and_replaced(server: WorkerForkServer, folder: Path) -> None:
    first = ready(started(server, folder), folder)
    before = server_of(folder)
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: not first.running, "its end is noticed")
    assert first.returncode == -signal.SIGKILL
    ready(started(server, folder), folder)
    assert server_of(folder) == before


def test_workers_end_with_their_server_and_a_new_one_starts(server: WorkerForkServer, folder: Path) -> None:
    first = ready(started(server, folder), folder)
    before = server_of(folder)
    os.kill(before, signal.SIGKILL)
    until(lambda: not first.running, "its end is noticed")
    assert first.returncode == -signal.SIGKILL
    ready(started(server, folder), folder)
    assert server_of(folder) != before


def test_server_ignores_signals_to_all_processes(server: WorkerForkServer, folder: Path) -> None:
    ready(started(server, folder), folder)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(server_of(folder), number)
    ready(started(server, folder), folder)


def test_worker_that_fails_to_start_exits_and_logs_the_error(server: WorkerForkServer, folder: Path) -> None:
    worker = started(server, folder, FARM_STORE_URL=f"sqlite:///{folder}/there/is/none.db")
    until(lambda: not worker.running, "it ends")
    assert worker.returncode == 1
    assert "Worker start failed" in (folder / "logs" / "run.log").read_text()
