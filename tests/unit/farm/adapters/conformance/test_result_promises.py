"""The conformance kit finds the faults of adapters that return results: each promise fails if it is broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from farm.adapters.conformance.adapter_promises import calls_of, every_kind
from farm.adapters.conformance.result_promises import examine_results
from farm.adapters.protocol import TrainerResult, TrainingRow, gives_results
from farm.client.farm import Farm
from farm.errors import InvalidRequest
from farm.records.rollout import POLICY_OUTCOMES, Outcome, Rollout
from farm.records.trajectory import ModelCall, Segment, segments

Fault = Callable[[TrainerResult, Rollout], TrainerResult]


def row_of(segment: Segment) -> TrainingRow:
    return TrainingRow(
        tuple(segment.prompt_ids.tolist()),
        tuple(segment.response_ids.tolist()),
        tuple(segment.response_mask.tolist()),
        tuple(segment.response_logprobs.tolist()),
        None,
    )


class PlainResults:
    """Results as the kit reads them, with a fault."""

    def __init__(self, fault: Fault = lambda result, _: result) -> None:
        self._fault = fault

    def result(self, rollout: Rollout, calls: Sequence[ModelCall], /) -> TrainerResult:
        ended = rollout.trainable
        result = TrainerResult(
            ended=ended,
            reward=rollout.reward if ended else None,
            stop_reason=str(rollout.outcome) if ended else "error",
            error="" if ended else f"{rollout.rollout_id} broke",
            rows=tuple(row_of(each) for each in segments(calls) if each.trainable) if ended else (),
            versions=(rollout.version_min, rollout.version_max),
            rollout_id=rollout.rollout_id,
        )
        return self._fault(result, rollout)

    def read_result(self, result: TrainerResult, /) -> TrainerResult:
        return result


class SpoilsCalls(PlainResults):
    """Writes into the calls that it received."""

    def result(self, rollout: Rollout, calls: Sequence[ModelCall], /) -> TrainerResult:
        for call in calls:
            call.observations.clear()
            call.messages.append({"role": "user", "content": "Go."})
        return super().result(rollout, calls)


def each(**changed: Any) -> PlainResults:
    """Return an adapter whose results have these fields replaced by functions of the result."""
    return PlainResults(lambda result, _: replace(result, **{name: new(result) for name, new in changed.items()}))


def each_row(**changed: Any) -> PlainResults:
    def faulty(result: TrainerResult, _: Rollout) -> TrainerResult:
        rows = tuple(replace(row, **{name: new(row) for name, new in changed.items()}) for row in result.rows or ())
        return replace(result, rows=rows)

    return PlainResults(faulty)


def of(outcome: Outcome, **changed: Any) -> PlainResults:
    """Return an adapter whose results of one outcome have these values."""
    return PlainResults(lambda result, original: replace(result, **changed) if original.outcome is outcome else result)


TOKENS, LOGPROBS = "tokens, for all", "log-probabilities are"
REWARD, BROKEN, STOPS = "has its own reward", "has no reward", "has a stop reason"
FAULTS: dict[str, tuple[PlainResults, str]] = {
    "zeros": (each(reward=lambda result: result.reward or 0.0), BROKEN),
    "zeros of what was cancelled": (of(Outcome.CANCELLED, reward=0.0), BROKEN),
    "a score from before": (PlainResults(lambda result, original: replace(result, reward=original.reward)), BROKEN),
    "broken is reported as an end": (each(ended=lambda result: True), BROKEN),
    "errors without a name": (each(error=lambda result: result.error and "it broke"), BROKEN),
    "no error": (each(error=lambda result: ""), BROKEN),
    "halved rewards": (each(reward=lambda result: result.reward and result.reward / 2), REWARD),
    "no zeros": (each(reward=lambda result: result.reward or None), REWARD),
    "a deadline is an error": (of(Outcome.DEADLINE, error="it was late"), REWARD),
    "a limit is reported as an end": (of(Outcome.MAX_TURNS, stop_reason="answered"), STOPS),
    "a limit is reported as broken": (of(Outcome.CONTEXT_FULL, stop_reason="error"), STOPS),
    "no stop reason": (of(Outcome.INVALID_ACTION, stop_reason=""), STOPS),
    "the rollout of another": (each(rollout_id=lambda result: "b.0.0"), "names its own rollout"),
    "a row less": (each(rows=lambda result: result.rows[:-1]), TOKENS),
    "shifted tokens": (each_row(response_ids=lambda row: (*row.response_ids[1:], 0)), TOKENS),
    "all sampled": (each_row(response_mask=lambda row: (1,) * len(row.response_ids)), TOKENS),
    "tokens of some": (of(Outcome.DEADLINE, rows=None), TOKENS),
    "a short list": (each_row(logprobs=lambda row: row.logprobs[1:]), LOGPROBS),
    "no log-probability": (each_row(logprobs=lambda row: (0.0,) * len(row.response_ids)), LOGPROBS),
    "log-probabilities of some": (
        each_row(logprobs=lambda row: row.logprobs if len(row.response_ids) > 1 else None),
        LOGPROBS,
    ),
    "one version": (each(versions=lambda result: (7, 7)), "versions, where"),
    "spoils": (SpoilsCalls(), "stay as they were"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_adapter_fails_the_promise(fault: str) -> None:
    adapter, promise = FAULTS[fault]
    broken = [result.promise for result in examine_results(adapter) if not result.ok]
    assert any(promise in each for each in broken), broken


@pytest.mark.parametrize("tokens", [True, False])
def test_correct_adapter_keeps_all_promises(tokens: bool) -> None:
    adapter = PlainResults() if tokens else each(rows=lambda result: None, versions=lambda result: None)
    assert gives_results(adapter)
    assert [result.fault for result in examine_results(adapter) if not result.ok] == []


def test_exception_fails_the_promise_and_a_missing_trainer_is_raised() -> None:
    def fail(error: Exception) -> PlainResults:
        def faulty(result: TrainerResult, _: Rollout) -> TrainerResult:
            raise error

        return PlainResults(faulty)

    results = list(examine_results(fail(ValueError("no room"))))
    assert {result.fault for result in results} == {"it raised ValueError: no room"}
    with pytest.raises(ModuleNotFoundError, match="rllm"):
        list(examine_results(fail(ModuleNotFoundError("No module named 'rllm'"))))


def test_constructed_calls_match_the_rows() -> None:
    for rollout in every_kind(64):
        made = segments(calls_of(rollout))
        sampled = [segment for segment in rollout.segments if segment.response_mask.any()]
        assert len(made) == len(sampled)
        for one, other in zip(made, sampled, strict=True):
            end = int(np.flatnonzero(other.response_mask)[-1]) + 1
            assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
            for name in ("response_ids", "response_mask", "response_logprobs", "policy_versions"):
                assert getattr(one, name).tolist() == getattr(other, name)[:end].tolist()
            assert one.trainable == other.trainable


def test_all_policy_outcomes_are_tried() -> None:
    seen: set[Outcome | None] = set()

    def note(result: TrainerResult, original: Rollout) -> TrainerResult:
        seen.add(original.outcome)
        return result

    list(examine_results(PlainResults(note)))
    assert seen >= POLICY_OUTCOMES
    assert seen >= set(Outcome)


def test_requesting_rows_of_a_result_adapter_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="adapter rllm returns a result for each rollout"):
        Farm.rows(cast(Any, None), "b", "rllm")
