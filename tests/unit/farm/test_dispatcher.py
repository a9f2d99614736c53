"""Fair shares between batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farm.dispatcher import shares
from farm.store.placement import Waiting


def test_a_small_batch_is_not_stuck_behind_a_huge_one() -> None:
    assert shares([Waiting("huge", 0, 20_000, 60), Waiting("small", 0, 8, 0)], 10) == {"small": 8, "huge": 2}


def test_batches_catch_up_with_each_other() -> None:
    assert shares([Waiting("a", 0, 100, 4), Waiting("b", 0, 100, 0), Waiting("c", 0, 100, 2)], 6) == {"b": 4, "c": 2}


def test_a_higher_priority_goes_first() -> None:
    assert shares([Waiting("low", 0, 100), Waiting("high", 5, 3)], 4) == {"high": 3, "low": 1}


def test_no_room_admits_nothing() -> None:
    assert shares([Waiting("a", 0, 5)], 0) == {}


batches = st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=6).map(
    lambda rows: [Waiting(f"b{i}", *row) for i, row in enumerate(rows)]
)


@given(waits=batches, room=st.integers(0, 100))
def test_all_room_is_used_and_nobody_gets_more_than_waits(waits: list[Waiting], room: int) -> None:
    given_room = shares(waits, room)
    assert sum(given_room.values()) == min(room, sum(wait.n_waiting for wait in waits))
    assert all(given_room.get(wait.batch_id, 0) <= wait.n_waiting for wait in waits)
