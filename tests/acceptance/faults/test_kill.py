"""kill -9 of workers and clients: every rollout still ends once, scored, and nothing of theirs is left."""

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
from pathlib import Path

import pytest
from sqlalchemy import func, select

import farm
from examples.problems import math_problems
from farm.embedded.embedded_farm import Embedded
from farm.store.database import Store
from farm.store.rollouts import batches
from tests.doubles import EngineDouble
from tests.services.farms import NOOP, embedded, farm_folder, left_of, until
from tests.services.soak import repeats
from workers.testing.scripted_model import Script
from workers.testing.serving import serving

SLOW = {"data_source": "noop", "fields": {"seconds": 1.0}}
N_SUBMITS = repeats(2, 12)
"""Number of clients that are killed during a submit."""
RUNNING = (farm.Stage.RUN, farm.State.ACTIVE)


@pytest.fixture(scope="module")
def here() -> Iterator[Embedded]:
    """Yield a farm for the tests of this module; when it has ended, nothing is left of it or of what was killed."""
    with farm_folder() as folder:
        with embedded(folder) as started:
            yield started
        assert left_of(folder) == []


@pytest.fixture(scope="module")
def client(here: Embedded) -> Iterator[farm.Farm]:
    with farm.connect(here.home) as connected:
        yield connected


@contextmanager
def engine(client: farm.Farm, latency_s: float) -> Iterator[None]:
    """Add an engine to the farm for one test."""
    with serving(EngineDouble(Script([]), latency_s=latency_s).app()) as policy:
        client.add_engine(f"{policy}/v1")
        try:
            yield
        finally:
            client.clear_engines()


def worker_pid(here: Embedded, stage: str) -> int:
    """Return the pid of a worker of this farm, once there is one: the last may have just been killed."""
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


def stages_of(client: farm.Farm, rollout_id: str, attempt: int) -> list[str]:
    return [each.stage.value for each in client.timings(rollout_id) if each.attempt == attempt]


def test_rollout_without_sandbox_starts_in_the_run_stage(here: Embedded, client: farm.Farm) -> None:
    empty = {"data_source": "empty", "fields": {"seconds": 0.0}}
    first = client.submit({"instances": [empty]})
    client.wait(first, 600)
    assert stages_of(client, f"{first}.0.0", 1) == ["init", "run", "eval"], "nobody has said yet that it needs none"
    until(lambda: any(node.without_sandbox for node in client.nodes()), "the node says so")
    named = client.submit({"instances": [empty], "agent": "noop"})
    batch_id = client.submit({"instances": [{**empty, "fields": {"seconds": 2.0}}] * 40})
    until(lambda: client.status(batch_id).stages[farm.Stage.RUN][farm.State.ACTIVE] > 10, "they run")
    os.kill(worker_pid(here, "run"), signal.SIGKILL)
    every_rollout_ended_once(client, batch_id)
    tried = {rollout.rollout_id: rollout.attempt for rollout in client.collect(batch_id)}
    assert all(stages_of(client, each, 1)[0] == "run" for each in tried)
    again = [each for each, attempt in tried.items() if attempt > 1]
    assert again, "rollouts of the worker run again"
    assert all(stages_of(client, each, 2) == ["init", "run", "eval"] for each in again[:3])
    client.wait(named, 600)
    assert stages_of(client, f"{named}.0.0", 1) == ["init", "run", "eval"], "an agent may want one"


def every_rollout_ended_once(client: farm.Farm, batch_id: str) -> None:
    rollouts = client.collect(batch_id, timeout_s=600)
    ended = [rollout for rollout in rollouts if rollout.state is farm.State.COMPLETED and rollout.reward is not None]
    assert len(ended) == len(rollouts), Counter(str(rollout.failure) for rollout in rollouts)
    assert sorted(rollout.cursor for rollout in rollouts) == list(range(1, len(rollouts) + 1))
    assert all(len(client.rewards(rollout.rollout_id)) == 1 for rollout in rollouts)


@pytest.mark.parametrize("stage", ["run", "init", "eval"])
def test_killed_worker_loses_and_repeats_no_rollout(here: Embedded, client: farm.Farm, stage: str) -> None:
    batch_id = client.submit({"instances": [SLOW] * 60, "max_attempts": 5})
    for n_ended in (5, 20):
        until(lambda n_ended=n_ended: client.status(batch_id).n_finished >= n_ended, f"{n_ended} have ended")  # type: ignore[misc]
        os.kill(worker_pid(here, stage), signal.SIGKILL)
    every_rollout_ended_once(client, batch_id)
    if stage == "run":
        attempts = [client.rollout(rollout.rollout_id).attempt for rollout in client.rollouts(batch_id)]
        assert max(attempts) > 1, "the kill took some rollouts away"


def test_rollouts_of_killed_worker_rerun_and_its_sandboxes_are_removed(here: Embedded, client: farm.Farm) -> None:
    with engine(client, latency_s=2.0):
        problems = tuple(math_problems(["gcd"], 6, seed=1))
        batch_id = client.submit(farm.BatchRequest(instances=problems, n_samples=2, max_attempts=5))
        until(lambda: client.status(batch_id).stages[farm.Stage.RUN][farm.State.ACTIVE] >= 4, "rollouts run", 60)
        os.kill(worker_pid(here, "run"), signal.SIGKILL)
        rollouts = client.collect(batch_id, timeout_s=600)
    assert all(rollout.reward is not None for rollout in rollouts)
    again = [rollout for rollout in rollouts if rollout.attempt > 1]
    assert again, "the kill took some rollouts away"
    lost = [timing for timing in client.timings(again[0].rollout_id) if timing.result == "lost"]
    assert lost, client.timings(again[0].rollout_id)
    scratch = here.home.parent / "scratch"
    until(lambda: not list(scratch.glob("*/sandboxes/[!.]*")), "the sandboxes of the dead are gone")


def test_thawed_worker_writes_no_stale_results(here: Embedded, client: farm.Farm) -> None:
    with engine(client, latency_s=4.0):
        problems = tuple(math_problems(["gcd"], 4, seed=1))
        batch_id = client.submit(farm.BatchRequest(instances=problems, n_samples=2, max_attempts=5))
        until(lambda: client.status(batch_id).stages[farm.Stage.RUN][farm.State.ACTIVE] >= 4, "rollouts run", 120)
        frozen = worker_pid(here, "run")
        os.kill(frozen, signal.SIGSTOP)
        held = [each.rollout_id for each in client.rollouts(batch_id) if (each.stage, each.state) == RUNNING]
        until(lambda: all(client.rollout(each).attempt > 1 for each in held), "the leases run out", 120)
        # it has received answers from the engine all the time
        os.kill(frozen, signal.SIGCONT)
        every_rollout_ended_once(client, batch_id)
    assert held
    for rollout in client.collect(batch_id):
        calls = client.calls(rollout.rollout_id)
        assert len(calls) == rollout.n_turns
        assert sum(call.n_response_tokens for call in calls) == rollout.n_response_tokens
        # one call gives one training row
        assert [segment.response_mask.sum() for segment in rollout.segments] == [rollout.n_response_tokens]
    runs = {
        (timing.attempt, timing.result) for each in held for timing in client.timings(each) if timing.stage == "run"
    }
    assert (1, "advanced") not in runs


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


def test_stream_resumes_after_its_client_is_killed(here: Embedded, client: farm.Farm) -> None:
    batch_id = client.submit({"instances": [SLOW] * 40})
    with client_process(STREAM, here.store_url, here.broker_url, batch_id) as process:
        assert process.stdout
        seen = [process.stdout.readline().split() for _ in range(10)]
    rest = client.stream(batch_id, cursor=int(seen[-1][0]), timeout_s=600)
    ended = [rollout_id for _, rollout_id in seen] + [rollout.rollout_id for rollout in rest]
    assert sorted(ended) == sorted(rollout.rollout_id for rollout in client.rollouts(batch_id))


@pytest.mark.soak
def test_submit_of_a_killed_client_is_atomic(postgres_store: Store, broker_url: str) -> None:
    chance = random.Random(5)
    with farm.connect(postgres_store.url, broker_url=broker_url) as client:
        for number in range(N_SUBMITS):
            key = f"batch-{number}"
            with client_process(SUBMIT, postgres_store.url, broker_url, key) as process:
                assert process.stdout
                assert process.stdout.readline() == "ready\n"
                # anywhere between the first statement and the answer
                time.sleep(chance.uniform(0.0, 0.8))
            request = {"instances": [NOOP] * 2000, "idempotency_key": key}
            batch_id = client.submit(request)
            assert client.submit(request) == batch_id
            assert client.status(batch_id).n_rollouts == 2000
        known = postgres_store.read(
            lambda connection: connection.execute(select(func.count()).select_from(batches)).scalar_one()
        )
        assert known == N_SUBMITS, "no batch twice, and none in part"
