"""kill -9 of a farm's parts while it plays: every rollout still ends once, scored, and nothing of the dead is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import farm
from examples.problems import math_problems
from farm.embedded import Embedded
from farm.store import migrations
from farm.store.engine import Store
from tests.services.farms import NOOP, QUICK, embedded, farm_folder, left_of, until
from workers.testing.book import PlayBook
from workers.testing.scripted import ScriptedServer
from workers.testing.serving import serving

SLOW = {"data_source": "noop", "fields": {"seconds": 1.0}}


@pytest.fixture
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


def worker_pid(here: Embedded, stage: str) -> int:
    """The pid of a worker of this farm."""
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                words = process.joinpath("cmdline").read_bytes().split(b"\0")
                environment = process.joinpath("environ").read_bytes()
            except OSError:
                continue
            if str(here.home).encode() in environment and any(word.startswith(f"{stage}@".encode()) for word in words):
                return int(process.name)
    raise LookupError(stage)


def every_rollout_ended_once(client: farm.Farm, batch_id: str) -> None:
    rollouts = client.collect(batch_id, timeout_s=120)
    ended = [rollout for rollout in rollouts if rollout.state is farm.State.COMPLETED and rollout.reward is not None]
    assert len(ended) == len(rollouts), Counter(str(rollout.failure) for rollout in rollouts)
    assert sorted(rollout.cursor for rollout in rollouts) == list(range(1, len(rollouts) + 1))
    assert all(len(client.rewards(rollout.rollout_id)) == 1 for rollout in rollouts)


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
def test_a_killed_worker_loses_and_doubles_nothing(folder: Path, stage: str) -> None:
    with embedded(folder) as here, farm.connect(here.home) as client:
        batch_id = client.submit({"instances": [SLOW] * 60, "max_attempts": 5})
        for n_ended in (5, 20):
            until(lambda n_ended=n_ended: client.status(batch_id).n_finished >= n_ended, f"{n_ended} have ended")  # type: ignore[misc]
            os.kill(worker_pid(here, stage), signal.SIGKILL)
        every_rollout_ended_once(client, batch_id)
        if stage == "run":
            attempts = [client.rollout(rollout.rollout_id).attempt for rollout in client.rollouts(batch_id)]
            assert max(attempts) > 1, "the kill took some rollouts away"


def test_sandboxes_of_a_killed_worker_are_played_again_and_gone(folder: Path) -> None:
    with (
        serving(ScriptedServer(PlayBook([]), latency_s=2.0).app()) as policy,
        embedded(folder, FARM_POLICY_URL=f"{policy}/v1") as here,
        farm.connect(here.home) as client,
    ):
        problems = tuple(math_problems(["gcd"], 6, seed=1))
        batch_id = client.submit(farm.BatchRequest(instances=problems, n_samples=2, max_attempts=5))
        until(lambda: client.status(batch_id).stages[farm.Stage.RUN][farm.State.ACTIVE] >= 4, "rollouts play", 60)
        os.kill(worker_pid(here, "run"), signal.SIGKILL)
        rollouts = client.collect(batch_id, timeout_s=120)
        assert all(rollout.reward is not None for rollout in rollouts)
        again = [rollout for rollout in rollouts if rollout.attempt > 1]
        assert again, "the kill took some rollouts away"
        lost = [timing for timing in client.timings(again[0].rollout_id) if timing.result == "lost"]
        assert lost, client.timings(again[0].rollout_id)
        until(lambda: not list((folder / "scratch").glob("*/sandboxes/[!.]*")), "the sandboxes of the dead are gone")
    assert left_of(folder) == []


def test_a_frozen_worker_writes_nothing_when_it_thaws(folder: Path) -> None:
    with embedded(folder, FARM_LEASE_S="2") as here, farm.connect(here.home) as client:
        batch_id = client.submit({"instances": [SLOW] * 8, "max_attempts": 5})
        until(lambda: client.status(batch_id).stages[farm.Stage.RUN][farm.State.ACTIVE] == 8, "all play")
        frozen = worker_pid(here, "run")
        os.kill(frozen, signal.SIGSTOP)
        until(lambda: all(rollout.attempt > 1 for rollout in client.rollouts(batch_id)), "the leases run out")
        os.kill(frozen, signal.SIGCONT)
        every_rollout_ended_once(client, batch_id)


@contextmanager
def node(folder: Path, name: str, store_url: str, broker_url: str) -> Iterator[subprocess.Popen[bytes]]:
    """`farm node`, as it is started under Slurm."""
    env = os.environ | QUICK | {"FARM_NODE": name, "FARM_STORE_URL": store_url, "FARM_BROKER_URL": broker_url}
    env |= {"FARM_HOME": str(folder / "home"), "FARM_SCRATCH": str(folder / "scratch")}
    command = [str(Path(sys.executable).parent / "farm"), "node", "--init", "4", "--run", "8", "--eval", "4"]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def test_a_killed_node_is_played_on_by_another(folder: Path, postgres_database: str, broker_url: str) -> None:
    store = Store(postgres_database)
    migrations.migrate(store)
    store.close()
    with (
        node(folder, "one", postgres_database, broker_url) as first,
        node(folder, "two", postgres_database, broker_url) as second,
        farm.connect(postgres_database, broker_url=broker_url) as client,
    ):
        batch_id = client.submit({"instances": [SLOW] * 60, "max_attempts": 5})
        until(lambda: {rollout.node for rollout in client.rollouts(batch_id)} >= {"one", "two"}, "both play")
        until(lambda: client.status(batch_id).n_finished >= 5, "some have ended")
        first.kill()
        first.wait()
        every_rollout_ended_once(client, batch_id)
        assert second.poll() is None
        assert client.submit({"instances": [NOOP]}), "the one that is left takes more"
    assert left_of(folder) == []


def test_a_terminated_node_hands_back_what_it_plays(folder: Path, postgres_database: str, broker_url: str) -> None:
    store = Store(postgres_database)
    migrations.migrate(store)
    store.close()
    with farm.connect(postgres_database, broker_url=broker_url) as client:
        with node(folder, "one", postgres_database, broker_url):
            batch_id = client.submit({"instances": [SLOW | {"fields": {"seconds": 300}}] * 4 + [SLOW] * 4})
            until(lambda: client.status(batch_id).n_finished == 4, "the short ones have ended")
        rollouts = client.rollouts(batch_id)
        assert [rollout.state for rollout in rollouts] == ["queued"] * 4 + ["completed"] * 4
        assert {rollout.node for rollout in rollouts[:4]} == {None}
        client.cancel(batch_id)
    assert left_of(folder) == []
