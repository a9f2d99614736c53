"""A worker that can start no more threads, or open no more files, ends and is replaced; its rollouts are run."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

import farm
from farm.records.rollout import Stage, State
from testkit.deadline import LONG_S
from tests.services.farms import NOOP, embedded, farm_folder, left_of, until

N = 24
SLOW = {"data_source": "noop", "fields": {"seconds": 0.5}}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[farm.Farm]:
    """Yield a client of a farm that the tests share; when it has ended, nothing is left of it."""
    with embedded(folder, FARM_STALL_S="4") as here, farm.connect(here.store_url, broker_url=here.broker_url) as result:
        assert result.collect(result.submit({"instances": [NOOP]}), timeout_s=LONG_S)[0].reward == 1.0
        yield result
    assert left_of(folder) == []


def worker_of(folder: Path, stage: Stage) -> int:
    """Return the process of a stage's pool; 0 while there is none."""
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                words = process.joinpath("cmdline").read_bytes()
                ours = str(folder).encode() in process.joinpath("environ").read_bytes()
            except OSError:
                continue
            if ours and f"{stage}@".encode() in words:
                return int(process.name)
    return 0


def exhaust(pid: int, limit: str) -> None:
    """Limit a process to what it already has."""
    if limit == "threads":
        # memory for all but the stack of a thread: a process without any memory ends in other ways
        stack, _ = resource.prlimit(pid, resource.RLIMIT_STACK)
        assert stack >= 4_000_000
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + stack * 3 // 4
        resource.prlimit(pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    else:
        highest = max(int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(3, highest), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@pytest.mark.parametrize("limit", ["threads", "descriptors"])
def test_exhausted_worker_is_replaced_and_no_rollout_fails(client: farm.Farm, folder: Path, limit: str) -> None:
    paths = folder / "home/logs/run.log", folder / "home/logs/node.log"
    before = [path.read_text() for path in paths]
    first = until(lambda: worker_of(folder, Stage.RUN), "there is a worker")
    exhaust(first, limit)
    batch_id = client.submit({"instances": [SLOW] * N, "max_attempts": 1, "max_losses": 3})
    result = client.collect(batch_id, timeout_s=LONG_S)
    assert {rollout.state for rollout in result} == {State.COMPLETED}, [rollout.failure for rollout in result]
    until(lambda: worker_of(folder, Stage.RUN) not in (0, first), "it was replaced")
    logs = [path.read_text().removeprefix(known) for path, known in zip(paths, before, strict=True)]
    assert "Worker exits: no threads, descriptors or memory left" in logs[0], logs[0]
    assert "not a stage message" not in logs[0]
    assert "exit status 75" in logs[1]


def test_node_with_exhausted_workers_gets_no_more_rollouts(client: farm.Farm, folder: Path) -> None:
    """Each new worker of one pool has no descriptors: the node reports it, and takes no rollouts.

    Not tested without threads: ended workers free enough of them for an idle one.
    """
    hurt: set[int] = set()

    def broken() -> bool:
        pid = worker_of(folder, Stage.RUN)
        if pid and pid not in hurt:
            try:
                # a starting worker is not ready before it has its threads
                if len(list(Path(f"/proc/{pid}/task").iterdir())) > 4:
                    exhaust(pid, "descriptors")
                    hurt.add(pid)
            except OSError:
                pass
        return any(node.state == "broken" for node in client.nodes())

    until(broken, "the node is out", 240.0)
    log = (folder / "home/logs/node.log").read_text()
    # workers that earlier tests harmed count too
    assert "3 times in a row" in log
    assert "gets no more rollouts" in log
