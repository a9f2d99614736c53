"""Rows of any tree of calls pass the audit, and altered rows do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from numpy.typing import NDArray

from farm.records.token_audit import check
from farm.records.trajectory import NO_VERSION, ModelCall, Segment, VersionSpan, segments, token_ids
from tests.services.soak import at_length


def called(
    index: int,
    prompt: list[int],
    response: list[int],
    *,
    spans: tuple[VersionSpan, ...] = (),
    exact: bool = True,
    mismatch: int | None = None,
    logprobs: list[float] | None = None,
) -> ModelCall:
    made = logprobs if logprobs is not None else [-(1 + index) / (2 + place) for place in range(len(response))]
    return ModelCall(
        index=index,
        messages=[],
        response={},
        finish_reason="stop",
        engine="e",
        started_at=0.0,
        latency_s=0.0,
        n_prompt_tokens=len(prompt),
        n_response_tokens=len(response),
        policy_version="3",
        prompt_ids=token_ids(prompt) if exact else None,
        response_ids=token_ids(response) if exact else None,
        response_logprobs=np.array(made, np.float32) if exact else None,
        versions=spans,
        mismatch=mismatch,
    )


few = st.integers(0, 2)
ids = st.lists(few, max_size=5)


@dataclass(frozen=True)
class Turn:
    """A call, described relative to those before it."""

    parent: int
    keep: int
    inserted: list[int]
    response: list[int]
    exact: bool
    split: int
    mismatch: bool


turns = st.builds(
    Turn,
    # usually the previous call; otherwise any other: a branch, or a sub-agent's first call
    parent=st.one_of(st.just(-1), st.just(-1), st.integers(-8, 8)),
    # usually all its ids; fewer are a compaction or a rewritten history
    keep=st.one_of(st.just(1000), st.just(1000), st.integers(0, 20)),
    inserted=ids,
    response=ids,
    exact=st.integers(0, 5).map(bool),
    split=st.integers(0, 5),
    mismatch=st.integers(0, 7).map(lambda n: n == 0),
)


def tree(first: list[int], moves: list[Turn]) -> list[ModelCall]:
    """Calls that continue, branch, compact, are cut short and continued, or come from engines without ids."""
    histories = [first]
    calls = []
    for index, turn in enumerate(moves):
        parent = histories[turn.parent % len(histories)] if turn.parent != -1 else histories[-1]
        prompt = parent[: turn.keep] + turn.inserted
        spans = tuple(
            VersionSpan(str(version), start, end)
            for version, (start, end) in enumerate(((0, turn.split), (turn.split, len(turn.response))))
            if start < end <= len(turn.response)
        )
        mismatch = len(prompt) // 2 if turn.mismatch else None
        calls.append(called(index, prompt, turn.response, spans=spans, exact=turn.exact, mismatch=mismatch))
        histories.append(prompt + turn.response)
    return calls


trees = st.builds(tree, ids, st.lists(turns, max_size=10))


@pytest.mark.soak
@given(calls=trees)
@examples(max_examples=at_length(60, 2000), deadline=None)
def test_rows_of_any_tree_of_calls_pass(calls: list[ModelCall]) -> None:
    rows = segments(calls)
    check(rows, calls)
    sampled = [token for call in calls if call.response_ids is not None for token in call.response_ids.tolist()]
    trained = [token for row in rows for token in row.response_ids[row.response_mask == 1].tolist()]
    assert sorted(sampled) == sorted(trained), "every sampled token trains once"
    for row in rows:
        assert np.all(row.policy_versions[row.response_mask == 1] >= 0)


@pytest.mark.soak
@given(calls=trees)
@examples(max_examples=at_length(40, 1000), deadline=None)
def test_every_exact_call_is_unchanged_in_a_row(calls: list[ModelCall]) -> None:
    rows = [(row, np.concatenate([row.prompt_ids, row.response_ids]).tolist()) for row in segments(calls)]
    untrainable = 0
    for call in calls:
        if call.prompt_ids is None or call.response_ids is None:
            continue
        whole = np.concatenate([call.prompt_ids, call.response_ids]).tolist()
        assert any(ids[: len(whole)] == whole for _, ids in rows)
        untrainable += call.mismatch is not None
    result = sum(row.mismatch is not None for row, _ in rows)
    assert (result == 0) == (untrainable == 0)
    assert result <= untrainable


def test_shared_tokens_of_a_branch_train_once() -> None:
    calls = [called(0, [1], [2, 3]), called(1, [1, 2, 3, 4], [5]), called(2, [1, 2, 3, 6], [7])]
    rows = segments(calls)
    check(rows, calls)
    assert [row.response_ids.tolist() for row in rows] == [[2, 3, 4, 5], [7]]
    assert rows[1].prompt_ids.tolist() == [1, 2, 3, 6]


def test_aborted_and_continued_answer_is_one_response() -> None:
    spans = (VersionSpan("4", 0, 1), VersionSpan("5", 1, 3))
    calls = [called(0, [1], [2, 3, 4], spans=spans)]
    (row,) = segments(calls)
    check([row], calls)
    assert row.policy_versions.tolist() == [4, 5, 5]


def test_mismatch_makes_only_its_own_row_untrainable() -> None:
    calls = [
        called(0, [1], [2]),
        called(1, [1, 2, 3], [4], mismatch=2),
        called(2, [1, 2, 3, 4, 5], [6], mismatch=1),
        called(3, [9], [8]),
    ]
    rows = segments(calls)
    check(rows, calls)
    assert [(row.mismatch, row.trainable) for row in rows] == [(1, False), (None, True)]
    assert "position 1" in rows[0].untrainable


def test_row_without_sampled_tokens_does_not_train() -> None:
    (row,) = segments([called(0, [1, 2], [])])
    assert row.untrainable == "it has no sampled tokens"


CALLS = [called(0, [1, 2], [3, 4]), called(1, [1, 2, 3, 4, 5], [6]), called(2, [7], [8, 9])]


def changed(values: NDArray[Any], place: int, value: float) -> NDArray[Any]:
    copy = values.copy()
    copy[place] = value
    return copy


def first(change: Callable[[Segment], Segment]) -> list[Segment]:
    rows = list(segments(CALLS))
    return [change(rows[0]), *rows[1:]]


TAMPERED: dict[str, tuple[list[Segment], str]] = {
    "a row is missing": (list(segments(CALLS))[1:], "5 tokens were sampled"),
    "a row twice": ([*segments(CALLS), segments(CALLS)[1]], "rows hold 7"),
    "another id": (first(lambda row: replace(row, response_ids=changed(row.response_ids, 0, 5))), "not sampled there"),
    "another id between": (
        first(lambda row: replace(row, response_ids=changed(row.response_ids, 2, 0))),
        "not sampled there",
    ),
    "another prompt": (first(lambda row: replace(row, prompt_ids=changed(row.prompt_ids, 0, 0))), "not sampled there"),
    "another log-probability": (
        first(lambda row: replace(row, response_logprobs=changed(row.response_logprobs, 0, -9.0))),
        "not sampled there",
    ),
    "another version": (
        first(lambda row: replace(row, policy_versions=changed(row.policy_versions, 0, 9))),
        "not sampled there",
    ),
    "a mask of 2": (first(lambda row: replace(row, response_mask=row.response_mask * 2)), "neither 0 nor 1"),
    "too little mask": (
        first(
            lambda row: replace(
                row,
                response_mask=changed(row.response_mask, 0, 0),
                response_logprobs=changed(row.response_logprobs, 0, 0.0),
                policy_versions=changed(row.policy_versions, 0, NO_VERSION),
            )
        ),
        "5 tokens were sampled, and the training rows hold 4",
    ),
    "too much mask": (first(lambda row: replace(row, response_mask=np.ones_like(row.response_mask))), "rows hold 6"),
    "a log-probability outside": (
        first(lambda row: replace(row, response_logprobs=changed(row.response_logprobs, 2, -1.0))),
        "has a log-probability",
    ),
    "a version outside": (
        first(lambda row: replace(row, policy_versions=changed(row.policy_versions, 2, 1))),
        "has a policy version",
    ),
    "not a number": (
        first(lambda row: replace(row, response_logprobs=changed(row.response_logprobs, 0, np.nan))),
        "not a number",
    ),
    "above zero": (first(lambda row: replace(row, response_logprobs=-row.response_logprobs)), "above 0"),
    "mismatch out of reach": (first(lambda row: replace(row, mismatch=99)), "its mismatch is at 99"),
    "a prompt that is too long": (
        first(
            lambda row: Segment(
                np.concatenate([row.prompt_ids, row.response_ids[:2]]),
                row.response_ids[2:],
                row.response_mask[2:],
                row.response_logprobs[2:],
                row.policy_versions[2:],
            )
        ),
        "rows hold 3",
    ),
    "a tail": (
        first(
            lambda row: Segment(
                row.prompt_ids,
                np.append(row.response_ids, np.int32(1)),
                np.append(row.response_mask, np.uint8(0)),
                np.append(row.response_logprobs, np.float32(0)),
                np.append(row.policy_versions, np.int32(NO_VERSION)),
            )
        ),
        "does not end where a call ended",
    ),
    "a prompt that is too short": (
        first(
            lambda row: Segment(
                row.prompt_ids[:1],
                np.insert(row.response_ids, 0, row.prompt_ids[1]),
                np.insert(row.response_mask, 0, 0),
                np.insert(row.response_logprobs, 0, 0),
                np.insert(row.policy_versions, 0, NO_VERSION),
            )
        ),
        "its prompt is not the prompt of any call",
    ),
}


@pytest.mark.parametrize(("rows", "reason"), TAMPERED.values(), ids=TAMPERED)
def test_altered_rows_are_refused(rows: list[Segment], reason: str) -> None:
    check(segments(CALLS), CALLS)
    with pytest.raises(ValueError, match=reason):
        check(rows, CALLS)


def test_no_calls_have_no_rows() -> None:
    check((), [])
    check((), [called(0, [1], [2], exact=False)])


def test_nan_log_probability_is_refused() -> None:
    calls = [called(0, [1], [2], logprobs=[float("-inf")])]
    with pytest.raises(ValueError, match="training row 0: a log-probability is not a number"):
        check(segments(calls), calls)
