"""The routed experts of rows, from those of the calls of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from farm.records.experts.expert_stretches import ExpertStretch, assembled, stretches_of
from farm.records.experts.routed_experts import CallExperts, ExpertIds, RowExperts
from farm.records.trajectory import ModelCall, Segment, segments, token_ids
from tests.services.model_calls import model_call


def call(index: int, prompt: Sequence[int], response: Sequence[int], start: int | None = 0) -> ModelCall:
    """A call whose experts are its own number at each position; it has none without a start."""
    n_rows = len(prompt) + len(response) - 1 - (start or 0)
    experts = CallExperts.of(start, np.full((n_rows, 2, 3), index + 1, np.uint8)) if start is not None else None
    return model_call(
        index,
        prompt_ids=token_ids(prompt),
        response_ids=token_ids(response),
        response_logprobs=np.full(len(response), -0.5, np.float32),
        n_prompt_tokens=len(prompt),
        n_response_tokens=len(response),
        routed_experts=experts,
    )


def taken(row: Segment, calls: Sequence[ModelCall]) -> list[int]:
    """Return, for each token of a row, the call that its experts come from, counted from 1; 0 for none."""
    of_calls: dict[int, ExpertIds] = {}
    for each in calls:
        if each.routed_experts is not None and each.routed_experts.ids is not None:
            of_calls[each.index] = each.routed_experts.ids
    experts = assembled(len(row.prompt_ids) + len(row.response_ids), stretches_of(row, calls), of_calls)
    if experts is None:
        return []
    result: list[int] = experts.ids[:, 0, 0].tolist()
    assert [int(each > 0) for each in result] == experts.known.tolist()
    return result


def test_last_token_of_a_call_has_experts_of_the_next_call() -> None:
    calls = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6], start=3)]
    [row] = segments(calls)
    assert taken(row, calls) == [1, 1, 1, 2, 2, 0]


def test_sampled_token_has_experts_of_the_call_that_sampled_it() -> None:
    calls = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6])]
    [row] = segments(calls)
    assert taken(row, calls) == [1, 1, 1, 2, 2, 0]


def test_branches_have_their_own_experts() -> None:
    calls = [call(0, [1, 2], [3, 4]), call(1, [1, 2], [3, 7]), call(2, [1, 2, 3, 7, 8], [9], start=3)]
    first, second = segments(calls)
    assert taken(first, calls) == [1, 1, 1, 0]
    assert taken(second, calls) == [2, 2, 2, 3, 3, 0]


def test_calls_that_do_not_train_provide_experts_to_rows_that_do() -> None:
    calls = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6], start=3)]
    [row] = segments(calls[1:])
    assert taken(row, calls) == [1, 1, 1, 2, 2, 0]


def test_row_shorter_than_its_call_has_experts_of_its_own_tokens() -> None:
    [row] = segments([call(0, [1, 2], [3, 4, 5])])
    assert taken(row.cut(1), [call(0, [1, 2], [3, 4, 5])]) == [1, 1, 1]


def test_call_without_experts_leaves_its_tokens_unknown() -> None:
    calls = [call(0, [1, 2], [3, 4], start=None), call(1, [1, 2, 3, 4, 5], [6], start=3)]
    [row] = segments(calls)
    assert taken(row, calls) == [0, 0, 0, 2, 2, 0]
    assert taken(row, [call(0, [1, 2], [3, 4], start=None)]) == []


def test_call_of_another_history_provides_no_experts() -> None:
    calls = [call(0, [9, 2], [3, 4]), call(1, [1, 2, 3], [4], start=None)]
    assert taken(segments(calls)[1], calls) == []


def test_number_of_ranges_equals_the_number_of_calls() -> None:
    calls, ids = [], [1]
    for index in range(50):
        calls.append(call(index, ids, [2, 3], start=max(len(ids) - 2, 0) if index else 0))
        ids = [*ids, 2, 3, 4]
    [row] = segments(calls)
    stretches = stretches_of(row, calls)
    assert [each.call for each in stretches] == list(range(50))
    assert [each.begin for each in stretches[1:]] == [each.end for each in stretches[:-1]]
    assert taken(row, calls)[-1] == 0
    assert all(taken(row, calls)[:-1])


def test_dtypes_of_calls_may_differ_and_shapes_may_not() -> None:
    narrow, wide = np.full((2, 2, 3), 7, np.uint8), np.full((2, 2, 3), 700, np.uint16)
    stretches = [ExpertStretch(0, 2, 0, 0), ExpertStretch(2, 4, 1, 0)]
    experts = assembled(5, stretches, {0: narrow, 1: wide})
    assert experts is not None
    assert experts.ids[:, 0, 0].tolist() == [7, 7, 700, 700, 0]
    other = assembled(5, stretches, {0: narrow, 1: np.ones((2, 1, 3), np.uint8)})
    assert other is not None
    assert other.known.tolist() == [1, 1, 0, 0, 0]
    assert assembled(5, stretches, {}) is None


def test_parts_of_one_call_must_be_contiguous() -> None:
    first, second = CallExperts.of(2, np.ones((3, 2, 2), np.uint8)), CallExperts.of(5, np.ones((1, 2, 2), np.uint16))
    whole = first.then(second)
    assert (whole.start, whole.end) == (2, 6)
    for wrong in (CallExperts.of(6, np.ones((1, 2, 2), np.uint8)), CallExperts.of(5, np.ones((1, 3, 2), np.uint8))):
        with pytest.raises(ValueError, match="and those from"):
            first.then(wrong)


def test_row_is_cut_with_its_experts() -> None:
    experts = RowExperts(np.arange(24, dtype=np.uint8), 3, 2, np.array([1, 1, 1, 0], np.uint8))
    row = Segment(
        token_ids([1]),
        token_ids([2, 3, 4]),
        np.ones(3, np.uint8),
        np.full(3, -1.0, np.float32),
        token_ids([0, 0, 0]),
        routed_experts=experts,
    )
    cut: Any = row.cut(1).routed_experts
    assert cut.ids.tolist() == experts.ids[:2].tolist()
    assert cut.known.tolist() == [1, 1]
    assert row.masked().routed_experts is experts
    with pytest.raises(ValueError, match="4 tokens has experts for 3"):
        replace(row, routed_experts=experts.cut(3))
    with pytest.raises(ValueError, match="24 expert ids of 3 tokens"):
        RowExperts(experts.flat, 3, 2, experts.known[:3])
