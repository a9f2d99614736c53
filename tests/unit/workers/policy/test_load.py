"""Counts of what is in flight, and how fast engines are."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.policy.load import IDLE, Load, Speed, Tally


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1000)), max_size=20), st.randoms())
def test_counts_are_those_of_the_calls_that_run_in_whatever_order_they_end(
    calls: list[tuple[str, int]], random: object
) -> None:
    tally, running = Tally(), []
    for url, n_tokens in calls:
        stack = ExitStack()
        stack.enter_context(tally.taken(url, n_tokens))
        running.append((url, n_tokens, stack))
    random.shuffle(running)  # type: ignore[attr-defined]
    while running:
        for url in "ab":
            mine = [n for name, n, _ in running if name == url]
            assert tally.of(url) == Load(len(mine), sum(mine))
        running.pop()[2].close()
    assert tally.of("a") == tally.of("b") == IDLE
    assert tally.snapshot() == {}


def test_a_call_that_fails_is_counted_no_more() -> None:
    tally = Tally()
    with pytest.raises(RuntimeError), tally.taken("a", 5):
        raise RuntimeError
    assert tally.own("a") == IDLE


def test_speed_follows_what_is_measured() -> None:
    speed = Speed()
    for _ in range(50):
        speed.measured(100, 1.0, 1.0)
    assert speed.value == pytest.approx(100)
    for _ in range(50):
        speed.measured(100, 4.0, 1.0)
    assert speed.value == pytest.approx(25, rel=0.01)


def test_an_engine_that_leaves_leaves_its_speed() -> None:
    tally = Tally()
    tally.measured("a", 100, 1.0, 1.0)
    assert tally.snapshot() == {"a": (0, 0, 100.0)}
    tally.forget("a")
    assert tally.speed("a") is None
