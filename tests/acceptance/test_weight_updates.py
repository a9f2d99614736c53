"""New weights on a running farm, with real workers: pause, name, resume; what may span an update, and what may not."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import farm
from farm.embedded.embedded_farm import Embedded
from farm.records.engine import PauseMode
from farm.records.rollout import Outcome, State
from tests.doubles import EngineDouble
from tests.services.farms import embedded, farm_folder, until
from workers.testing.serving import serving

N = 6
QUESTION = {"data_source": "chat", "fields": {"question": "What do you make of it?"}}


class _Bench:
    """One slow engine with random turns, and a client of its farm."""

    def __init__(self, client: farm.Farm, double: EngineDouble) -> None:
        self.client = client
        self.double = double

    def submit(self, max_tokens: int, **more: Any) -> str:
        limits = {"max_tokens": max_tokens, "max_turns": 1, "run_s": 60}
        return self.client.submit({"instances": [QUESTION], "n_samples": N, "limits": limits} | more)

    def sampling(self, n: int = N) -> None:
        until(lambda: self.double.n_running == n, lambda: f"{n} calls sample; {self.double.n_running} do")

    def versions(self, batch_id: str) -> list[set[int]]:
        """Return the weights that sampled each rollout."""
        rows = [rollout.segments for rollout in self.client.collect(batch_id, timeout_s=90)]
        assert all(len(row) == 1 for row in rows)
        return [set(np.unique(row.policy_versions[row.response_mask == 1]).tolist()) for [row] in rows]


@pytest.fixture(scope="module")
def here() -> Iterator[Embedded]:
    with farm_folder() as folder, embedded(folder) as started:
        yield started


@pytest.fixture(scope="module")
def client(here: Embedded) -> Iterator[farm.Farm]:
    with farm.connect(here.store_url, broker_url=here.broker_url) as connected:
        yield connected


@contextmanager
def engine(client: farm.Farm, **options: Any) -> Iterator[_Bench]:
    """Yield a separate engine on the shared farm."""
    double = EngineDouble(weight_version="1", mean_tokens=100_000, **options)
    with serving(double.app()) as url:
        client.add_engine(f"{url}/v1")
        until(lambda: client.engines()[0].engine.info is not None, "the engine was asked what it can do")
        try:
            yield _Bench(client, double)
        finally:
            client.clear_engines(forget_weights=True)


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_running_calls_cross_an_update_and_record_both_versions(client: farm.Farm, mode: PauseMode) -> None:
    with engine(client, tokens_per_s=60) as here:
        batch_id = here.submit(180)
        here.sampling()
        until(lambda: here.double.n_tokens >= 20 * N, "each call has sampled some tokens")
        with here.client.weight_update("2", mode=mode):
            frozen = here.double.n_tokens
        assert frozen < 180 * N
        assert here.versions(batch_id) == [{1, 2}] * N
        rollouts = here.client.collect(batch_id, 0)
        assert {(rollout.version_min, rollout.version_max) for rollout in rollouts} == {(1, 2)}
        assert all(len(rollout.segments[0].response_ids) == 180 for rollout in rollouts)


def test_drain_ends_running_calls_and_holds_back_new_ones(client: farm.Farm) -> None:
    with engine(client, tokens_per_s=60) as here:
        batch_id = here.submit(300)
        here.sampling()
        held: list[str] = []
        with here.client.weight_update("2", mode="drain"):
            assert here.double.n_running == 0
            held.append(here.submit(20))
            until(
                lambda: here.client.status(held[0]).stages[farm.Stage.RUN][State.ACTIVE] == N,
                "the new batch runs",
            )
            assert here.double.n_running == 0
        assert here.versions(batch_id) == [{1}] * N
        assert here.versions(held[0]) == [{2}] * N


@pytest.mark.parametrize("on_stale", ["drop", "restart"])
def test_max_staleness_of_a_batch_drops_or_restarts_rollouts(client: farm.Farm, on_stale: str) -> None:
    with engine(client, tokens_per_s=100) as here:
        batch_id = here.submit(400, max_staleness=0, on_stale=on_stale)
        here.sampling()
        until(lambda: here.double.n_tokens >= 10 * N, "each call has sampled some tokens")
        with here.client.weight_update("2", mode="keep"):
            pass
        rollouts = here.client.collect(batch_id, timeout_s=90)
        if on_stale == "restart":
            assert here.versions(batch_id) == [{2}] * N
            assert all(rollout.trainable and rollout.attempt == 2 for rollout in rollouts)
        else:
            assert {rollout.outcome for rollout in rollouts} == {Outcome.STALE}
            assert not any(rollout.trainable or rollout.reward is not None for rollout in rollouts)
            assert all("max_staleness 0" in rollout.failure.message for rollout in rollouts if rollout.failure)


def test_cancel_of_a_batch_frees_its_engine(client: farm.Farm) -> None:
    with engine(client, tokens_per_s=50) as here:
        batch_id = here.submit(5_000)
        here.sampling()
        here.client.cancel(batch_id)
        here.sampling(0)
        assert here.double.n_cancelled == N


@pytest.mark.parametrize("fault", ["429", "503"])
def test_timeout_with_a_busy_engine_gives_no_reward(client: farm.Farm, fault: str) -> None:
    with engine(client) as here:
        here.double.faults.set_rates({fault: 1.0})
        limits = {"max_tokens": 20, "max_turns": 1, "run_s": 3}
        request = {"instances": [QUESTION], "n_samples": N, "limits": limits, "max_attempts": 1}
        rollouts = here.client.collect(here.client.submit(request), timeout_s=60)
        assert {rollout.outcome for rollout in rollouts} == {Outcome.ENGINE_ERROR}
        assert all(rollout.reward is None and not rollout.trainable for rollout in rollouts)
        assert all(rollout.failure and "busy" in rollout.failure.message for rollout in rollouts)


def test_batch_waits_for_a_late_engine(client: farm.Farm) -> None:
    with engine(client) as here:
        [known] = here.client.engines()
        here.client.remove_engine(known.engine.url)
        batch_id = here.submit(20)
        until(lambda: here.client.status(batch_id).stages[farm.Stage.RUN][State.ACTIVE] == N, "the batch runs")
        assert here.client.status(batch_id).n_finished == 0
        here.client.add_engine(known.engine.url)
        assert here.client.wait(batch_id, 60).n_completed == N


def test_first_update_covers_a_newly_added_engine(client: farm.Farm) -> None:
    with engine(client), serving(EngineDouble().app()) as url:
        client.add_engine(f"{url}/v1")
        with client.weight_update("3") as stored_engines:
            assert [engine.url for engine in stored_engines][1:] == [f"{url}/v1"]
        assert [state.engine.engine_version for state in client.engines()] == ["3", "3"]


def test_restarted_engine_without_weights_is_reported_and_updated(client: farm.Farm) -> None:
    with engine(client) as here:
        client.set_version("2")
        # as if it had been restarted
        here.double.scheduler.version = "default"
        until(lambda: client.engines()[0].engine.status == "without weights", "it is seen that it lacks them")
        batch_id = here.submit(20)
        [warning] = client.status(batch_id).warnings
        assert "lacks version 2" in warning
        result: list[tuple[str, str]] = []
        with client.serve_weights(lambda engine, version: result.append((engine.url, version))):
            assert here.versions(batch_id) == [{2}] * N
        assert result == [(client.engines()[0].engine.url, "2")]
        assert client.status(batch_id).warnings == ()


def test_restarted_engine_loads_weights_from_their_path(client: farm.Farm) -> None:
    with engine(client) as here:
        with client.weight_update("2", path="/shared/2"):
            pass
        here.double.scheduler.version = "default"
        until(lambda: here.double.machine.loaded == ["/shared/2"], "it is told to load them")
        assert here.versions(here.submit(20)) == [{2}] * N


_KILLED = """
import os, signal, sys
import farm
client = farm.connect(sys.argv[1], broker_url=sys.argv[2])
with client.weight_update("8", mode=sys.argv[3]):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("mode", ["drain", "keep", "abort"])
def test_next_trainer_takes_over_an_update_of_a_killed_trainer(
    here: Embedded, client: farm.Farm, mode: PauseMode
) -> None:
    with engine(client, tokens_per_s=60) as bench:
        batch_id = bench.submit(300)
        bench.sampling()
        done = subprocess.run([sys.executable, "-c", _KILLED, here.store_url, here.broker_url, mode], check=False)
        assert done.returncode == -signal.SIGKILL
        left = client.engines()[0].engine
        assert (left.paused, left.engine_version) == (mode, "")
        with client.weight_update("9", mode=mode):
            assert client.engines()[0].engine.paused_by != left.paused_by
        assert {max(versions) for versions in bench.versions(batch_id)} <= {1, 9}
        assert client.engines()[0].engine.status == "ready"


_PAUSING = """
import sys
import farm
client = farm.connect(sys.argv[1], broker_url=sys.argv[2])
with client.weight_update("8", mode="drain"):
    pass
"""


def test_engine_of_trainer_killed_during_drain_is_abandoned(here: Embedded, client: farm.Farm) -> None:
    with engine(client, tokens_per_s=60) as bench:
        batch_id = bench.submit(600)
        bench.sampling()
        with subprocess.Popen([sys.executable, "-c", _PAUSING, here.store_url, here.broker_url]) as trainer:
            until(lambda: client.engines()[0].engine.paused, "the trainer pauses it")
            trainer.kill()
        until(lambda: client.engines()[0].engine.status == "abandoned", "the trainer is missed", 60)
        client.resume_engines()
        assert bench.versions(batch_id) == [{1}] * N


def test_rollouts_collected_late_are_checked_for_staleness(client: farm.Farm) -> None:
    with engine(client):
        client.set_version("3")
        request = {"instances": [QUESTION], "n_samples": N, "limits": {"max_tokens": 20, "max_turns": 1}}
        batch_id = client.submit(request)
        client.wait(batch_id, 60)
        client.set_version("6")
        assert len(list(client.stream(batch_id, max_staleness=3))) == N
        assert len(list(client.stream_groups(batch_id, max_staleness=3))) == 1
        assert list(client.stream(batch_id, max_staleness=2)) == []
        assert list(client.stream_groups(batch_id, max_staleness=2)) == []
