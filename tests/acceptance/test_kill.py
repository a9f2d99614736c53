"""kill -9 of a farm's parts while it plays: every rollout still ends once, scored, and nothing of the dead is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import func, select

import farm
from examples.problems import math_problems
from farm.embedded import Embedded
from farm.store import migrations
from farm.store.engine import Store
from farm.store.rollouts import batches
from tests.services.farms import NOOP, embedded, farm_folder, left_of, node, until
from workers.testing.book import PlayBook
from workers.testing.engine import EngineDouble
from workers.testing.serving import serving

SLOW = {"data_source": "noop", "fields": {"seconds": 1.0}}
PLAYING = (farm.Stage.RUN, farm.State.ACTIVE)


@pytest.fixture
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


def worker_pid(here: Embedded, stage: str) -> int:
    """The pid of a worker of this farm, once there is one: the last may have been killed a moment ago."""
    return until(lambda: _worker_pid(here, stage), f"there is a worker of stage {stage}")


def _worker_pid(here: Embedded, stage: str) -> int:
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                words = process.joinpath("cmdline").read_bytes().split(b"\0")
                environment = process.joinpath("environ").read_bytes()
            except OSError:
                continue
            if str(here.home).encode() in environment and any(word.startswith(f"{stage}@".encode()) for word in words):
                return int(process.name)
    return 0


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
        serving(EngineDouble(PlayBook([]), latency_s=2.0).app()) as policy,
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
    with (
        serving(EngineDouble(PlayBook([]), latency_s=4.0).app()) as policy,
        embedded(folder, FARM_POLICY_URL=f"{policy}/v1", FARM_LEASE_S="2") as here,
        farm.connect(here.home) as client,
    ):
        problems = tuple(math_problems(["gcd"], 4, seed=1))
        batch_id = client.submit(farm.BatchRequest(instances=problems, n_samples=2, max_attempts=5))
        until(lambda: client.status(batch_id).stages[farm.Stage.RUN][farm.State.ACTIVE] >= 4, "rollouts play", 120)
        frozen = worker_pid(here, "run")
        os.kill(frozen, signal.SIGSTOP)
        held = [each.rollout_id for each in client.rollouts(batch_id) if (each.stage, each.state) == PLAYING]
        until(lambda: all(client.rollout(each).attempt > 1 for each in held), "the leases run out", 120)
        # it has had answers from the engine all the while
        os.kill(frozen, signal.SIGCONT)
        every_rollout_ended_once(client, batch_id)
        assert held
        for rollout in client.collect(batch_id):
            calls = client.calls(rollout.rollout_id)
            assert len(calls) == rollout.n_turns
            assert sum(call.n_response_tokens for call in calls) == rollout.n_response_tokens
            # one call is one training row
            assert [segment.response_mask.sum() for segment in rollout.segments] == [rollout.n_response_tokens]
        runs = {
            (timing.attempt, timing.result) for each in held for timing in client.timings(each) if timing.stage == "run"
        }
        assert (1, "advanced") not in runs
    assert left_of(folder) == []


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


def test_a_killed_node_plays_on_when_it_is_started_again(folder: Path, postgres_database: str, broker_url: str) -> None:
    store = Store(postgres_database)
    migrations.migrate(store)
    store.close()
    # nothing runs out by itself: it is the node that knows, when it comes back
    patient = partial(node, folder, "one", postgres_database, broker_url, FARM_LEASE_S="600", FARM_NODE_TIMEOUT_S="600")
    with farm.connect(postgres_database, broker_url=broker_url) as client:
        with patient() as first:
            batch_id = client.submit({"instances": [SLOW] * 30, "max_attempts": 1})
            until(lambda: client.status(batch_id).n_finished >= 5, "some have ended", 120)
            first.kill()
            first.wait()
            assert client.status(batch_id).n_finished < 30
        with patient():
            every_rollout_ended_once(client, batch_id)
        assert any(rollout.attempt > 1 for rollout in client.rollouts(batch_id)), "the kill took some rollouts away"
    assert left_of(folder) == []


SUBMIT = """
import sys, farm
url, broker_url, key = sys.argv[1:]
request = {"instances": [{"data_source": "noop", "fields": {}}] * 2000, "idempotency_key": key}
with farm.connect(url, broker_url=broker_url) as client:
    print("ready", flush=True)
    client.submit(request)
    print("done", flush=True)
"""
STREAM = """
import sys, farm
url, broker_url, batch_id = sys.argv[1:]
with farm.connect(url, broker_url=broker_url) as client:
    for rollout in client.stream(batch_id):
        print(rollout.cursor, rollout.rollout_id, flush=True)
"""


@contextmanager
def client_process(program: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A trainer's process, killed at the end."""
    command = [sys.executable, "-c", program, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_batch_of_a_client_killed_in_its_submit_is_there_whole_or_not_at_all(
    postgres_database: str, broker_url: str
) -> None:
    store = Store(postgres_database)
    migrations.migrate(store)
    chance = random.Random(5)
    with farm.connect(postgres_database, broker_url=broker_url) as client:
        for number in range(6):
            key = f"batch-{number}"
            with client_process(SUBMIT, postgres_database, broker_url, key) as process:
                assert process.stdout
                assert process.stdout.readline() == "ready\n"
                # anywhere between the first statement and the answer
                time.sleep(chance.uniform(0.0, 0.8))
            request = {"instances": [NOOP] * 2000, "idempotency_key": key}
            batch_id = client.submit(request)
            assert client.submit(request) == batch_id
            assert client.status(batch_id).n_rollouts == 2000
        known = store.read(
            lambda connection: connection.execute(select(func.count()).select_from(batches)).scalar_one()
        )
        assert known == 6, "no batch twice, and none in part"
    store.close()


def test_a_stream_of_a_killed_client_goes_on_where_it_was(folder: Path) -> None:
    with embedded(folder) as here, farm.connect(here.home) as client:
        batch_id = client.submit({"instances": [SLOW] * 40})
        with client_process(STREAM, here.store_url, here.broker_url, batch_id) as process:
            assert process.stdout
            seen = [process.stdout.readline().split() for _ in range(10)]
        rest = client.stream(batch_id, cursor=int(seen[-1][0]), timeout_s=120)
        ended = [rollout_id for _, rollout_id in seen] + [rollout.rollout_id for rollout in rest]
        assert sorted(ended) == sorted(rollout.rollout_id for rollout in client.rollouts(batch_id))
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
