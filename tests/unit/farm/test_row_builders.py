"""Rows by name: only from calls that train, and without tokens that were not sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from farm import plugins
from farm.records.request import TrainCalls
from farm.records.trajectory import ModelCall, Segment, segments, token_ids
from farm.row_builders import build_rows, chosen_calls

PLUGIN = "tests.unit.farm.test_row_builders"


def call(index: int, prompt: list[int], response: list[int], **labels: str) -> ModelCall:
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
        policy_version="1",
        prompt_ids=token_ids(prompt),
        response_ids=token_ids(response),
        response_logprobs=np.full(len(response), -0.5, np.float32),
        labels=labels,
    )


# three turns of the work, and between them a title in a separate conversation
CALLS = [
    call(0, [1], [2, 3], model="big", depth="0"),
    call(1, [9], [8], model="small-1", depth="0"),
    call(2, [1, 2, 3, 4], [5], model="big", depth="1"),
    call(3, [1, 2, 3, 4, 5, 6], [7], model="big", depth="2"),
]


def trained(rows: Sequence[Segment]) -> list[list[int]]:
    return [row.response_ids[row.response_mask == 1].tolist() for row in rows]


def rows_of(rule: TrainCalls, name: str = "prefix", calls: Sequence[ModelCall] = CALLS) -> list[list[int]]:
    return trained(build_rows(name, chosen_calls(rule, calls), calls))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (TrainCalls(), [[2, 3, 5, 7], [8]]),
        (TrainCalls(last=1), [[7]]),
        (TrainCalls(last=3), [[8], [5, 7]]),
        (TrainCalls(last=99), [[2, 3, 5, 7], [8]]),
        (TrainCalls(labels={"model": "big"}), [[2, 3, 5, 7]]),
        (TrainCalls(labels={"model": "small*"}), [[8]]),
        (TrainCalls(without={"model": "small*"}), [[2, 3, 5, 7]]),
        (TrainCalls(labels={"model": "big"}, last=1), [[7]]),
        (TrainCalls(labels={"model": "big"}, without={"depth": "0"}), [[5, 7]]),
        (TrainCalls(labels={"nothing": "*"}), []),
        (TrainCalls(without={"subagent": "?*"}), [[2, 3, 5, 7], [8]]),
    ],
)
def test_only_selected_calls_train(rule: TrainCalls, expected: list[list[int]]) -> None:
    helper = call(4, [], [], model="big", role="helper")
    assert [row for row in rows_of(rule, calls=[*CALLS, helper]) if row] == expected


def test_tokens_of_other_calls_are_in_the_prompt_or_masked() -> None:
    rule = TrainCalls(labels={"model": "big"})
    first, middle, last = chosen_calls(rule, CALLS)
    (row,) = build_rows("prefix", [first, last], CALLS)
    assert row.prompt_ids.tolist() == [1]
    assert row.response_ids.tolist() == [2, 3, 4, 5, 6, 7]
    assert row.response_mask.tolist() == [1, 1, 0, 0, 0, 1]
    assert not row.response_logprobs[2:5].any()
    (row,) = build_rows("prefix", [last], CALLS)
    assert row.prompt_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert middle.labels["depth"] == "1"


def test_per_call_rule_makes_a_row_of_each_call() -> None:
    assert rows_of(TrainCalls(), "per_call") == [[2, 3], [8], [5], [7]]


def test_without_training_calls_there_is_an_untrainable_row() -> None:
    (row,) = build_rows("prefix", [], CALLS)
    assert row.response_ids.tolist() == [2, 3, 4, 5, 6, 7]
    assert not row.trainable
    assert build_rows("prefix", [], []) == ()


def last_only(calls: Sequence[ModelCall]) -> list[Segment]:
    return list(segments(calls[-1:]))


def lazy(calls: Sequence[ModelCall]) -> object:
    return (row for row in segments(calls))


def doubled(calls: Sequence[ModelCall]) -> list[Segment]:
    return [*segments(calls), *segments(calls)]


def invented(calls: Sequence[ModelCall]) -> list[Segment]:
    (row, *_) = segments(calls)
    return [replace(row, response_ids=row.response_ids + 1)]


def unmasked(calls: Sequence[ModelCall]) -> list[Segment]:
    (row, *_) = segments(calls)
    return [replace(row, response_mask=np.ones_like(row.response_mask))]


def no_rows(calls: Sequence[ModelCall]) -> list[object]:
    return [{"prompt_ids": [1]}]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {name: EntryPoint(name, f"{PLUGIN}:{name}", "farm.row_builders") for name in globals()}
    ours = plugins.installed("farm.row_builders")
    monkeypatch.setattr(plugins, "load", lambda group, name: {**there, **ours}[name].load())


def test_plug_in_builds_the_rows() -> None:
    assert rows_of(TrainCalls(), "last_only") == [[7]]
    assert rows_of(TrainCalls(), "lazy") == [[2, 3, 5, 7], [8]]


@pytest.mark.parametrize(
    ("name", "error"),
    [("doubled", ValueError), ("invented", ValueError), ("unmasked", ValueError), ("no_rows", TypeError)],
)
def test_plug_in_that_returns_invalid_rows_is_refused(name: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        rows_of(TrainCalls(), name)
