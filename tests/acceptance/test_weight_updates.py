"""New weights while a farm plays, through real workers: pause, name, resume; what may cross an update, and what not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import farm
from farm.engine import PauseMode
from farm.rollout import Outcome, State
from tests.services.farms import embedded, farm_folder, until
from workers.testing.engine import EngineDouble
from workers.testing.serving import serving

N = 6
QUESTION = {"data_source": "chat", "fields": {"question": "What do you make of it?"}}


class Bench:
    """One slow engine that plays random turns, and a client of its farm."""

    def __init__(self, client: farm.Farm, double: EngineDouble) -> None:
        self.client = client
        self.double = double

    def submit(self, max_tokens: int, **more: Any) -> str:
        limits = {"max_tokens": max_tokens, "max_turns": 1, "run_s": 60}
        return self.client.submit({"instances": [QUESTION], "n_samples": N, "limits": limits} | more)

    def sampling(self, n: int = N) -> None:
        until(lambda: self.double.n_running == n, lambda: f"{n} calls sample; {self.double.n_running} do")

    def versions(self, batch_id: str) -> list[set[int]]:
        """The weights that sampled each rollout."""
        rows = [rollout.segments for rollout in self.client.collect(batch_id, timeout_s=90)]
        assert all(len(row) == 1 for row in rows)
        return [set(np.unique(row.policy_versions[row.response_mask == 1]).tolist()) for [row] in rows]


@pytest.fixture(scope="module")
def client() -> Iterator[farm.Farm]:
    with (
        farm_folder() as folder,
        embedded(folder) as here,
        farm.connect(here.store_url, broker_url=here.broker_url) as connected,
    ):
        yield connected


@contextmanager
def engine(client: farm.Farm, **options: Any) -> Iterator[Bench]:
    """An engine of the test's own on the farm that all share."""
    double = EngineDouble(weight_version="1", mean_tokens=100_000, **options)
    with serving(double.app()) as url:
        client.add_engine(f"{url}/v1")
        until(lambda: client.engines()[0].engine.info is not None, "the engine was asked what it can do")
        try:
            yield Bench(client, double)
        finally:
            client.clear_engines()


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_what_runs_crosses_an_update_and_records_both(client: farm.Farm, mode: PauseMode) -> None:
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


def test_a_drain_ends_what_runs_and_holds_back_the_rest(client: farm.Farm) -> None:
    with engine(client, tokens_per_s=100) as here:
        batch_id = here.submit(100)
        here.sampling()
        held: list[str] = []
        with here.client.weight_update("2", mode="drain"):
            assert here.double.n_running == 0
            held.append(here.submit(20))
            until(
                lambda: here.client.status(held[0]).stages[farm.Stage.RUN][State.ACTIVE] == N,
                "the new batch wants to play",
            )
            assert here.double.n_running == 0
        assert here.versions(batch_id) == [{1}] * N
        assert here.versions(held[0]) == [{2}] * N


@pytest.mark.parametrize("on_stale", ["drop", "restart"])
def test_a_batch_says_how_old_its_weights_may_be(client: farm.Farm, on_stale: str) -> None:
    with engine(client, tokens_per_s=100) as here:
        batch_id = here.submit(150, max_staleness=0, on_stale=on_stale)
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


def test_cancelling_a_batch_frees_its_engine(client: farm.Farm) -> None:
    with engine(client, tokens_per_s=50) as here:
        batch_id = here.submit(5_000)
        here.sampling()
        here.client.cancel(batch_id)
        here.sampling(0)
        assert here.double.n_cancelled == N


@pytest.mark.parametrize("fault", ["429", "503"])
def test_a_deadline_with_a_busy_engine_is_no_reward(client: farm.Farm, fault: str) -> None:
    with engine(client) as here:
        here.double.faults.set_rates({fault: 1.0})
        limits = {"max_tokens": 20, "max_turns": 1, "run_s": 3}
        request = {"instances": [QUESTION], "n_samples": N, "limits": limits, "max_attempts": 1}
        rollouts = here.client.collect(here.client.submit(request), timeout_s=60)
        assert {rollout.outcome for rollout in rollouts} == {Outcome.ENGINE_ERROR}
        assert all(rollout.reward is None and not rollout.trainable for rollout in rollouts)
        assert all(rollout.failure and "busy" in rollout.failure.message for rollout in rollouts)


def test_an_engine_that_comes_late_is_waited_for(client: farm.Farm) -> None:
    with engine(client) as here:
        [known] = here.client.engines()
        here.client.remove_engine(known.engine.url)
        batch_id = here.submit(20)
        until(lambda: here.client.status(batch_id).stages[farm.Stage.RUN][State.ACTIVE] == N, "the batch wants to play")
        assert here.client.status(batch_id).n_finished == 0
        here.client.add_engine(known.engine.url)
        assert here.client.wait(batch_id, 60).n_completed == N
