"""A producer keeps groups in flight while the trainer trains, but no more than can be trained in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from farm.collecting import Producer
from farm.errors import InvalidRequest
from farm.records.rollout import Group
from farm.store.database import Store
from tests.integration.collecting.scripted_run import N_SAMPLES, ScriptedRun, numbers

_DEADLINE_S = 30.0


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_producer_requests_as_many_groups_as_can_train_in_time(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, {})
    collector = run.collector(max_inflight_groups=4, leftovers="carry_over", max_staleness=2)
    with Producer(collector, poll_s=0.01):
        time.sleep(0.05)
        assert run.scripted.queued() == [], "it knows no step yet"
        assert numbers(collector.collect(1)) == [0, 1, 2]
        n_before = len(run.scripted.finished) // N_SAMPLES
        # while the trainer trains, ended groups are replaced: 4 in flight, up to 6 groups that wait or are in flight
        for n_waiting in range(1, 7):
            until(lambda: len(run.scripted.queued()) >= N_SAMPLES, f"{n_waiting} are in flight")
            run.complete_group()
        time.sleep(0.1)
        assert run.scripted.queued() == [], "six wait, as many as two more steps can train"
        assert len(run.scripted.finished) // N_SAMPLES == n_before + 6
        n_finished = len(run.scripted.finished)
        assert [numbers(collector.collect(step)) for step in (2, 3)] == [[3, 4, 5], [6, 7, 8]]
        until(lambda: bool(run.scripted.queued()), "it goes on")
    assert len(run.scripted.finished) == n_finished
    assert set(run.n_samples_run().values()) == {N_SAMPLES}


def test_restarted_producer_continues_from_existing_groups(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, {})
    options: dict[str, Any] = {"leftovers": "carry_over", "max_staleness": 1}
    first = run.collector(**options)
    assert numbers(first.collect(1)) == [0, 1, 2]
    with Producer(first, poll_s=0.01):
        until(lambda: len(run.scripted.queued()) == 3 * N_SAMPLES, "three are in flight")
    run.scripted.run_next()
    restarted = run.collector(**options)
    with Producer(restarted, poll_s=0.01):
        assert numbers(restarted.collect(2)) == [3, 4, 5]
    assert len(run.scripted.finished) == 6 * N_SAMPLES


def test_producer_logs_an_error_of_the_accept_rule_and_continues(
    sqlite_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    faults = [ValueError("not now"), ValueError("not now")]

    def accept(group: Group) -> bool:
        if faults and len(group.rollouts) == N_SAMPLES and len(run.scripted.finished) > 3 * N_SAMPLES:
            raise faults.pop()
        return True

    run = ScriptedRun(sqlite_store, {})
    collector = run.collector(leftovers="carry_over", max_staleness=1, accept=accept)
    collector.collect(1)
    with Producer(collector, poll_s=0.01):
        until(lambda: len(run.scripted.queued()) == 3 * N_SAMPLES, "three are in flight")
        run.complete_group()
        until(lambda: not faults, "it goes on after a fault")
        assert numbers(collector.collect(2)) == [3, 4, 5]
    assert caplog.text.count("Production ahead of the trainer is paused: not now") in (1, 2)


def test_on_policy_producer_is_refused(sqlite_store: Store) -> None:
    with pytest.raises(InvalidRequest) as error:
        Producer(ScriptedRun(sqlite_store, {}).collector())
    assert error.value.field == "leftovers"
