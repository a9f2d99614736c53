"""The warm pool of a whole farm: filled for queued rollouts, kept within its limits, and emptied after them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import farm
from examples.problems import humaneval_problems
from farm.embedded.embedded_farm import Embedded
from farm.records.rollout import Stage, State
from tests.conftest import absent
from tests.services.farms import embedded_of, farm_folder, left_of, processes_of, until
from workers.plugins.registry import sandbox as provider

(PROBLEM,) = humaneval_problems(1)
N_RUN, N_READY, IDLE_S = 4, 3, 60


@pytest.fixture(scope="module")
def silent() -> Iterator[str]:
    """Yield a policy that takes requests and never answers, so that rollouts stay in the run stage."""
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    if missing := provider("namespace").missing():
        absent(missing)
    with farm_folder() as made:
        yield made


@pytest.fixture(scope="module")
def here(folder: Path, silent: str) -> Iterator[Embedded]:
    """Yield a farm until the last test of this module stops it."""
    with embedded_of(
        N_RUN,
        folder,
        FARM_SANDBOX="namespace",
        FARM_POLICY_URL=silent,
        FARM_POLICY_MODEL="silent",
        FARM_WARM_POOL=str(N_READY),
        # longer than the start of a worker on a busy machine: while none runs, no sandbox is kept in use
        FARM_WARM_POOL_IDLE_S=str(IDLE_S),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(here: Embedded) -> Iterator[farm.Farm]:
    with farm.connect(here.store_url, broker_url=here.broker_url) as connected:
        yield connected


@pytest.fixture
def batch_id(client: farm.Farm, folder: Path) -> Iterator[str]:
    """Yield a batch of which 12 rollouts are placed, the node's limit; 4 run, and the rest need a warm pool."""
    submitted = client.submit({"instances": [PROBLEM] * 24})
    yield submitted
    client.cancel(submitted)


def ready(folder: Path) -> set[str]:
    return {path.name for path in (folder / "scratch").glob("*/sandboxes/.ready.*")}


def make_old(paths: Iterable[Path]) -> None:
    """Set their last use back by the time for which unused sandboxes are kept."""
    for path in paths:
        with suppress(FileNotFoundError):
            used_at = path.stat().st_mtime - IDLE_S
            os.utime(path, (used_at, used_at))


def unused_s(paths: Iterable[Path]) -> float:
    """Return the seconds since the last use of any of these."""
    return time.time() - max((path.stat().st_mtime for path in paths), default=0.0)


def init_workers(folder: Path) -> list[int]:
    mark = "init@"
    return [int(line.partition(":")[0]) for line in processes_of(folder) if mark in line and "workers.queue" in line]


def test_warm_pool_is_filled_for_queued_rollouts_and_survives_a_worker(
    client: farm.Farm, batch_id: str, folder: Path
) -> None:
    until(lambda: client.status(batch_id).stages[Stage.RUN][State.ACTIVE] == N_RUN, "all run slots are used", 60.0)
    until(lambda: len(ready(folder)) == N_READY, "the stock is full", 60.0)
    before = ready(folder)
    for pid in init_workers(folder):
        os.kill(pid, signal.SIGKILL)
    until(lambda: client.cancel(batch_id, [f"{batch_id}.0.0"]) or True, "one is cancelled")
    until(
        lambda: len(before - ready(folder)) == 1,
        lambda: f"the next one has taken one of {before}, and no more are gone: {ready(folder)} are there",
        60.0,
    )
    until(lambda: len(ready(folder)) == N_READY, "the new worker has filled it again", 60.0)
    client.cancel(batch_id)
    client.wait(batch_id, 120)
    scratch = folder / "scratch"
    make_old(scratch.glob("*/used/*"))
    until(lambda: unused_s(scratch.glob("*/sandboxes/.ready.*")) > 3.0, "nothing keeps it in use any more", 60.0)
    make_old(scratch.glob("*/sandboxes/.ready.*"))
    until(lambda: not ready(folder), "what is not wanted is dropped", 180.0)


def test_warm_pool_is_removed_with_its_node(batch_id: str, folder: Path) -> None:
    until(lambda: len(ready(folder)) == N_READY, "the stock is full", 60.0)
    (supervisor,) = (
        int(line.partition(":")[0]) for line in processes_of(folder) if "workers.node" in line.partition(": ")[2]
    )
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not ready(folder), "the stock is gone", 60.0)
    until(lambda: not list((folder / "scratch").glob("*/sandboxes/*")), "so is everything", 60.0)


def test_farm_stopped_while_it_fills_the_warm_pool_leaves_nothing(here: Embedded, batch_id: str, folder: Path) -> None:
    until(lambda: ready(folder), "there is one in stock", 120.0)
    here.stop()
    assert left_of(folder) == []
