"""Counts of calls in flight, and the measured speed of engines."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.policy.routing.load import IDLE, Load, LoadTracker


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1000)), max_size=20), st.randoms())
def test_counts_are_those_of_running_calls_in_any_order_of_ends(calls: list[tuple[str, int]], random: object) -> None:
    load_tracker, running = LoadTracker(), []
    for url, n_tokens in calls:
        stack = ExitStack()
        stack.enter_context(load_tracker.taken(url, n_tokens))
        running.append((url, n_tokens, stack))
    random.shuffle(running)  # type: ignore[attr-defined]
    while running:
        for url in "ab":
            mine = [n for name, n, _ in running if name == url]
            assert load_tracker.of(url) == Load(len(mine), sum(mine))
        running.pop()[2].close()
    assert load_tracker.of("a") == load_tracker.of("b") == IDLE
    assert load_tracker.snapshot() == {}


def test_failed_call_is_no_longer_counted() -> None:
    load_tracker = LoadTracker()
    with pytest.raises(RuntimeError), load_tracker.taken("a", 5):
        raise RuntimeError
    assert load_tracker.own("a") == IDLE


def test_speed_follows_the_measurements() -> None:
    tracker = LoadTracker()
    for _ in range(50):
        tracker.measured("a", 100, 1.0, 1.0)
    assert tracker.speed("a") == pytest.approx(100)
    for _ in range(50):
        tracker.measured("a", 100, 4.0, 1.0)
    assert tracker.speed("a") == pytest.approx(25, rel=0.01)


def test_speed_of_a_removed_engine_is_forgotten() -> None:
    load_tracker = LoadTracker()
    load_tracker.measured("a", 100, 1.0, 1.0)
    assert load_tracker.snapshot() == {"a": (0, 0, 100.0)}
    load_tracker.forget("a")
    assert load_tracker.speed("a") is None
