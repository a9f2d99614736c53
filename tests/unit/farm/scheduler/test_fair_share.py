"""Fair shares between batches, and the nodes that run them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.records.node import Node
from farm.scheduler.admissions import FreeSlots, fair_shares
from farm.store.placement import WaitingBatch


def test_small_batch_does_not_wait_behind_a_huge_one() -> None:
    assert fair_shares([WaitingBatch("huge", 0, 20_000, 60), WaitingBatch("small", 0, 8, 0)], 10) == {
        "small": 8,
        "huge": 2,
    }


def test_batches_catch_up_with_each_other() -> None:
    assert fair_shares(
        [WaitingBatch("a", 0, 100, 4), WaitingBatch("b", 0, 100, 0), WaitingBatch("c", 0, 100, 2)], 6
    ) == {"b": 4, "c": 2}


def test_higher_priority_goes_first() -> None:
    assert fair_shares([WaitingBatch("low", 0, 100), WaitingBatch("high", 5, 3)], 4) == {"high": 3, "low": 1}


def test_no_free_slots_admit_nothing() -> None:
    assert fair_shares([WaitingBatch("a", 0, 5)], 0) == {}


batches = st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=6).map(
    lambda rows: [WaitingBatch(f"b{i}", *row) for i, row in enumerate(rows)]
)


@given(waits=batches, room=st.integers(0, 100))
def test_all_free_slots_are_used_and_no_batch_gets_more_than_it_has_waiting(
    waits: list[WaitingBatch], room: int
) -> None:
    given_room = fair_shares(waits, room)
    assert sum(given_room.values()) == min(room, sum(wait.n_waiting for wait in waits))
    assert all(given_room.get(wait.batch_id, 0) <= wait.n_waiting for wait in waits)


@given(waits=batches, room=st.integers(0, 100))
def test_waiting_batches_of_one_priority_get_equal_shares(waits: list[WaitingBatch], room: int) -> None:
    given_room = fair_shares(waits, room)
    has = {wait.batch_id: wait.n_placed + given_room.get(wait.batch_id, 0) for wait in waits}
    for one in waits:
        for other in waits:
            if other.priority == one.priority and given_room.get(other.batch_id, 0) < other.n_waiting:
                assert not given_room.get(one.batch_id, 0) or has[one.batch_id] <= has[other.batch_id] + 1
            if other.priority > one.priority and given_room.get(other.batch_id, 0) < other.n_waiting:
                assert not given_room.get(one.batch_id, 0)


def test_emptiest_node_comes_first() -> None:
    assert list(iter(FreeSlots({"a": 1, "b": 3, "full": 0}).take, None)) == ["b", "b", "a", "b"]


def test_node_that_lost_a_worker_comes_last_but_is_used() -> None:
    assert list(iter(FreeSlots({"a": 1, "b": 3, "c": 1}, {"b"}).take, None)) == ["a", "c", "b", "b", "b"]


def test_node_whose_job_ends_too_soon_is_skipped() -> None:
    slots = FreeSlots({"short": 9, "long": 2})
    taken = [slots.take(lambda node: node == "long") for _ in range(3)]
    assert taken == ["long", "long", None]
    assert slots.take() == "short"


@pytest.mark.parametrize(
    ("left_s", "up_s", "seconds", "lasts"),
    [
        (None, 1e9, 1e9, True),
        (3600, 0, 1800, True),
        (3600, 1700, 1800, True),
        (3600, 1900, 1800, False),
        (600, 0, 1800, True),
        (600, 299, 1800, True),
        (600, 301, 1800, False),
        (600, 700, 0.0, False),
    ],
)
def test_node_lasts_for_the_remaining_time_of_its_job(
    left_s: float | None, up_s: float, seconds: float, lasts: bool
) -> None:
    info = {} if left_s is None else {"job_left_s": left_s}
    assert Node("n", 8, 4, 8, 4, [], info, up_s=up_s).lasts_for(seconds) is lasts
