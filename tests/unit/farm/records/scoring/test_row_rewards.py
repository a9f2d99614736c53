"""Rewards of single calls and rows: the position of a call in the rows, and the stored rewards of an evaluator."""

from __future__ import annotations

from typing import Any

import pytest

from farm.records.submission import RowRewards, row_rewards, submitted_calls
from farm.records.trajectory import ModelCall, segments, segments_per_call
from tests.services.wire_clients import model_call

ANSWER = {"role": "assistant", "content": "x"}


def call(index: int, prompt: list[int], sampled: list[int], **more: Any) -> ModelCall:
    return model_call(index, prompt, sampled, response=ANSWER, **more)


CALLS = [
    call(0, [1, 2], [3, 4], messages=[{"role": "user", "content": "u"}]),
    call(1, [1, 2, 3, 4, 5], [6]),
    call(2, [7], [3, 4]),
    # a branch: it shares the sampled tokens of the first row
    call(3, [1, 2, 3, 4, 9], [3]),
]


def test_call_is_placed_where_it_was_sampled() -> None:
    shown = submitted_calls(CALLS, segments(CALLS))
    assert [(each.index, each.row, each.position) for each in shown] == [(0, 0, 1), (1, 0, 3), (2, 1, 1), (3, 2, 0)]
    assert shown[0].messages == [{"role": "user", "content": "u"}]
    for each in shown:
        assert each.response == ANSWER


def test_per_call_rows_hold_one_call_each() -> None:
    shown = submitted_calls(CALLS, segments_per_call(CALLS))
    assert [(each.row, each.position) for each in shown] == [(0, 1), (1, 0), (2, 1), (3, 0)]


def test_equal_calls_have_a_row_each() -> None:
    alike = [call(index, [1, 2], [3, 4]) for index in range(3)]
    shown = submitted_calls(alike, segments_per_call(alike))
    assert [each.row for each in shown] == [0, 1, 2]
    assert row_rewards(shown, {}, {2: 1.0}) == RowRewards(rows={2: 1.0})
    # one of which trains
    assert [each.row for each in submitted_calls(alike, segments_per_call(alike[2:]))] == [0, 0, 0]


def test_call_that_does_not_train_has_no_place() -> None:
    masked = [row.masked() for row in segments(CALLS)]
    without = call(4, [1], [2])
    without.response_ids = None
    shown = submitted_calls([*CALLS[:1], without], masked)
    assert [(each.row, each.position) for each in shown] == [(None, None)] * 2
    given = row_rewards(shown, {0: 1.0, 4: 2.0}, {})
    assert given == RowRewards()


def test_given_rewards_are_applied_to_rows() -> None:
    rows = segments(CALLS)
    given = row_rewards(submitted_calls(CALLS, rows), {1: 0.5, 0: -1.0, 2: 0.0}, {2: 7.0})
    assert given is not None
    again = RowRewards.model_validate(given.model_dump(mode="json"))
    assert again == given
    applied = again.applied(rows)
    assert [row.turn_rewards for row in applied] == [((1, -1.0), (3, 0.5)), ((1, 0.0),), ()]
    assert [row.reward for row in applied] == [None, None, 7.0]
    assert applied[2].cut(0).reward == 7.0
    assert [row.reward for row in rows] == [None] * 3


@pytest.mark.parametrize(("of_calls", "of_rows"), [({4: 1.0}, {}), ({-1: 1.0}, {}), ({}, {3: 1.0}), ({}, {-1: 1.0})])
def test_rewards_of_unknown_calls_and_rows_are_refused(of_calls: dict[int, float], of_rows: dict[int, float]) -> None:
    with pytest.raises(ValueError, match=r"it has no (call|row) "):
        row_rewards(submitted_calls(CALLS, segments(CALLS)), of_calls, of_rows)


def test_no_rewards_give_none() -> None:
    assert row_rewards(submitted_calls(CALLS, segments(CALLS)), {}, {}) is None
