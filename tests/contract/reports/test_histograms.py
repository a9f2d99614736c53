"""Histograms count each ended rollout once: by any process, at any time, and also when it is scored again."""

from __future__ import annotations

from functools import partial
from math import isfinite

import pytest

from farm.observing.observer import Observer
from farm.records.rollout import Failure, Stage
from farm.retry_policy import retry_decision
from farm.store import attempts, trajectories
from farm.store.attempts import RetrySettings
from farm.store.database import Store
from farm.store.reports import histograms
from farm.store.reports.histograms import CALLS, REWARDS, Counts
from tests.contract.store.test_store import advance, announce, claimed, finish, new_batch, place, run_to_end
from tests.contract.store.test_store_rescore import cancel, rescore
from tests.services.model_calls import model_call


def observe(store: Store) -> dict[tuple[str, str], tuple[int, float]]:
    """Return counts after an update: the number of values, and their sum."""
    Observer(store, lambda: True).look()
    return {key: (sum(each.counts), each.total) for key, each in store.read(histograms.stored).items()}


def test_ended_rollouts_are_counted_once(store: Store) -> None:
    announce(store)
    batch_id = new_batch(store, 3, max_attempts=2)
    place(store, batch_id)
    held = claimed(store, f"{batch_id}.0.0", Stage.INIT)
    failure, decision = Failure("sandbox_error", "broken"), retry_decision("sandbox_error")
    settings = RetrySettings(0.0, 60.0)
    store.write(lambda connection: attempts.end_attempt(connection, held, failure, decision, settings))
    assert observe(store) == {}, "it has not ended"
    place(store, batch_id)
    run_to_end(store, f"{batch_id}.0.0", attempt=2, reward=0.75)
    run_to_end(store, f"{batch_id}.1.0", reward=-0.5)
    first = observe(store)
    assert first["farm_reward", ""] == (2, 0.25)
    assert first["farm_rollouts_ended", "submitted"] == (2, 2)
    assert first["farm_attempts_ended", "sandbox_error"] == (1, 1)
    assert first["farm_stage_seconds", "init"][0] == first["farm_stage_queue_seconds", "init"][0] == 3
    assert first["farm_stage_seconds", "eval"][0] == first["farm_turns", ""][0] == 2
    assert observe(store) == first
    cancel(store, f"{batch_id}.2.0")
    assert observe(store)["farm_rollouts_ended", "cancelled"] == (1, 1)


def test_rescore_adds_one_reward_and_one_stage(store: Store) -> None:
    announce(store)
    batch_id = new_batch(store)
    place(store, batch_id)
    run_to_end(store, f"{batch_id}.0.0", reward=0.0)
    first = observe(store)
    rescore(store, batch_id)
    place(store, batch_id)
    finish(store, claimed(store, f"{batch_id}.0.0", Stage.EVAL, 2), 1.0)
    again = observe(store)
    assert again["farm_reward", ""] == (2, 1.0)
    assert again["farm_stage_seconds", "eval"][0] == 2
    assert [again[key] for key in first if key[1] in {"init", "run"}] == [
        first[key] for key in first if key[1] in {"init", "run"}
    ]
    assert again["farm_turns", ""] == first["farm_turns", ""]


def test_engine_latency_is_counted_per_call(store: Store) -> None:
    announce(store)
    batch_id = new_batch(store)
    place(store, batch_id)
    advance(store, claimed(store, f"{batch_id}.0.0", Stage.INIT))
    rows = trajectories.CallLog(f"{batch_id}.0.0", 1)
    for index, latency_s in enumerate([0.05, 0.1, 5.0, 20_000.0]):
        row = rows.row(model_call(index, latency_s=latency_s))
        store.write(partial(trajectories.record_call, row=row))
    cancel(store, batch_id)
    observe(store)
    counts = store.read(histograms.stored)[CALLS.name, ""]
    assert [(bound, n) for bound, n in counts.cumulative() if bound in {"0.1", "3.0", "10.0", "10000.0", "+Inf"}] == [
        ("0.1", 2),
        ("3.0", 2),
        ("10.0", 3),
        ("10000.0", 3),
        ("+Inf", 4),
    ]


def test_rewards_without_a_finite_sum_are_counted(store: Store) -> None:
    announce(store)
    for n, rewards in enumerate([(1e308, 1e308), (-1e308, -1e308), (0.5,)], 1):
        batch_id = new_batch(store, len(rewards))
        place(store, batch_id)
        for index, reward in enumerate(rewards):
            run_to_end(store, f"{batch_id}.{index}.0", reward=reward)
        count, total = observe(store)["farm_reward", ""]
        assert count == (2, 4, 5)[n - 1]
        assert isfinite(total)


def test_concurrent_counters_add_a_value_once(store: Store) -> None:
    announce(store)
    batch_id = new_batch(store)
    place(store, batch_id)
    run_to_end(store, f"{batch_id}.0.0")
    assert store.read(histograms.uncounted) == [(batch_id, 0, 1)]
    found = store.read(partial(histograms.counted, batch_id=batch_id, after=0, last=1))
    add = partial(histograms.add, batch_id=batch_id, after=0, last=1, histograms=found)
    assert [store.write(add), store.write(add)] == [True, False]
    assert store.read(histograms.uncounted) == []
    assert sum(store.read(histograms.stored)["farm_reward", ""].counts) == 1


@pytest.mark.parametrize(("value", "bucket"), [(-3.0, "0.0"), (0.0, "0.0"), (0.6, "0.75"), (1.0, "1.0"), (9.0, "+Inf")])
def test_bucket_contains_values_up_to_its_bound(value: float, bucket: str) -> None:
    counts = Counts(REWARDS)
    counts.count([value])
    assert next(bound for bound, n in counts.cumulative() if n) == bucket
