"""Tests of the promises of trainer adapters on constructed rollouts of every kind: `farm doctor --adapter NAME`.

They know no trainer's format: an adapter reads its own rows back (`farm.adapters.protocol`), and these are compared
with the segments that they were made from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from itertools import count, groupby
from typing import Any, TypeAlias, TypeVar

import numpy as np

from farm.adapters.protocol import TrainerAdapter, TrainingRow, training_rows
from farm.ids import RolloutRef
from farm.records.rollout import Failure, Outcome, Rollout, Stage, State
from farm.records.trajectory import NO_VERSION, Message, ModelCall, Segment, VersionSpan, token_ids

_USER: Message = {"role": "user", "content": "Go on."}
_ANSWER: Message = {"role": "assistant", "content": "I do."}

BATCH = "constructed"
N_SAMPLES = 2
LONG = 4_096
"""The tokens of the longest response."""
OBSERVED = 0
"""In place of a version: a token that was not sampled."""

T = TypeVar("T")

Source: TypeAlias = tuple[Rollout, Segment]
_NEWEST = 9


def calls_of(rollout: Rollout) -> tuple[ModelCall, ...]:
    """Return calls whose `segments` are those of the rollout with any sampled token."""
    numbers = count()
    return tuple(call for segment in rollout.segments for call in _calls(segment, numbers))


def _calls(segment: Segment, numbers: Iterator[int]) -> Iterator[ModelCall]:
    whole = [*segment.prompt_ids.tolist(), *segment.response_ids.tolist()]
    start = len(segment.prompt_ids)
    for begin, end in _stretches(segment.response_mask.tolist()):
        index = next(numbers)
        yield ModelCall(
            index=index,
            # each conversation begins with this message, so each row is one
            messages=[_USER] if begin == 0 else [],
            observations=[_USER] if end < len(segment.response_mask) else [],
            response=_ANSWER,
            finish_reason="stop",
            engine="http://constructed/v1",
            started_at=float(index + 1),
            latency_s=0.5,
            n_prompt_tokens=start + begin,
            n_response_tokens=end - begin,
            prompt_ids=token_ids(whole[: start + begin]),
            response_ids=token_ids(whole[start + begin : start + end]),
            response_logprobs=segment.response_logprobs[begin:end].copy(),
            versions=tuple(_spans(segment.policy_versions[begin:end].tolist())),
            mismatch=segment.mismatch if begin == 0 else None,
        )


def _stretches(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    begin = 0
    for value, members in groupby(mask):
        end = begin + len(list(members))
        if value:
            yield begin, end
        begin = end


def _spans(versions: Sequence[int]) -> Iterator[VersionSpan]:
    begin = 0
    for version, members in groupby(versions):
        end = begin + len(list(members))
        if version != NO_VERSION:
            yield VersionSpan(str(version), begin, end)
        begin = end


def segment(n_prompt: int, versions: Sequence[int], mismatch: int | None = None, first_id: int = 100) -> Segment:
    """Return a row whose tokens were sampled by these weights, one for each; OBSERVED for a token that was not sampled.

    NO_VERSION means unknown weights. Nearby tokens differ, and so do log-probabilities.
    """
    n = len(versions)
    mask = np.array([version != OBSERVED for version in versions], np.uint8)
    return Segment(
        token_ids(range(first_id, first_id + n_prompt)),
        token_ids(range(first_id + 1_000, first_id + 1_000 + n)),
        mask,
        (mask * np.linspace(-3, -1e-6, n)).astype(np.float32),
        np.where(mask == 1, np.array(versions), NO_VERSION).astype(np.int32),
        mismatch,
    )


def rollout(number: int, segments: Sequence[Segment], **changed: Any) -> Rollout:
    """Return the rollout with this number, in groups of N_SAMPLES: completed and scored, unless `changed`."""
    group, sample = divmod(number, N_SAMPLES)
    complete = Rollout(
        rollout_id=str(RolloutRef(BATCH, group, sample)),
        batch_id=BATCH,
        group_index=group,
        sample_index=sample,
        data_source="noop",
        instance_id=f"instance-{group}",
        stage=Stage.EVAL,
        state=State.COMPLETED,
        attempt=1,
        node=None,
        outcome=Outcome.SUBMITTED,
        reward=0.25 * number - 0.5,
        failure=None,
        n_turns=1,
        n_response_tokens=sum(int(each.response_mask.sum()) for each in segments),
        submitted_at=0.0,
        finished_at=1.0,
        finish_seq=number + 1,
        segments=tuple(segments),
        n_segments=len(segments),
    )
    return replace(complete, **changed)


def broken(number: int, outcome: Outcome, segments: Sequence[Segment]) -> Rollout:
    """Return a rollout that failed or was cancelled: no reward, and the rows recorded so far."""
    cancelled = outcome is Outcome.CANCELLED
    state, failure = (State.CANCELLED, None) if cancelled else (State.FAILED, Failure(str(outcome), "constructed"))
    return rollout(number, segments, outcome=outcome, state=state, reward=None, failure=failure)


def every_kind(n_long: int = LONG) -> list[Rollout]:
    """Return whole groups of rollouts of every kind; the longest response has `n_long` tokens."""
    return [
        rollout(0, [segment(2, [7, 7, 7])]),
        # branched: several rows, one of two versions
        rollout(1, [segment(3, [7, 7]), segment(4, [7, OBSERVED, OBSERVED, 8, 8], first_id=200), segment(1, [8])]),
        # a zero earned by the policy
        rollout(2, [segment(2, [7])], reward=0.0, outcome=Outcome.DEADLINE),
        broken(3, Outcome.ENGINE_ERROR, [segment(2, [7])]),
        broken(4, Outcome.CANCELLED, [segment(2, [7])]),
        # an engine saw other tokens; nothing was sampled; and a row that may train
        rollout(5, [segment(2, [7, 7], mismatch=3), segment(2, [OBSERVED] * 2), segment(9, [6, 7], first_id=300)]),
        # ended before its first token
        rollout(6, [], outcome=Outcome.DEADLINE),
        rollout(7, [segment(2, [NO_VERSION, 7])]),
        # dropped as stale: an earlier score does not count
        rollout(8, [segment(2, [7])], reward=1.0, outcome=Outcome.STALE, state=State.FAILED),
        # untrusted as a whole
        rollout(9, [segment(2, [7, 7], mismatch=2)]),
        rollout(10, [segment(n_long // 8, [7, OBSERVED, 8, 9] * (n_long // 4))], outcome=Outcome.CONTEXT_FULL),
        rollout(11, [segment(1, [9])], outcome=Outcome.INVALID_ACTION),
    ]


def only_broken() -> list[Rollout]:
    """Return rollouts of which none may train."""
    outcomes = [each for each in Outcome if each not in {Outcome.STALE}]
    untrainable = [each for each in outcomes if not rollout(0, [], outcome=each).trainable]
    return [broken(number, outcome, [segment(2, [7, 7])]) for number, outcome in enumerate(untrainable)]


@dataclass(frozen=True, slots=True)
class AdapterResult:
    """One promise of an adapter, and the first case that breaks it; empty if it holds."""

    promise: str
    fault: str

    @property
    def ok(self) -> bool:
        return not self.fault


class Broken(Exception):
    """A promise does not hold; the message names the row and the difference."""


def examine_adapter(adapter: TrainerAdapter[Any]) -> Iterator[AdapterResult]:
    """Test every promise on an adapter. Its errors break the tested promise, except ImportError."""
    return tried(_PROMISES, adapter)


def tried(promises: Mapping[str, Callable[[T], None]], adapter: T) -> Iterator[AdapterResult]:
    """Test promises on an adapter; see `examine_adapter`. Raises ImportError if its trainer is not installed."""
    for promise, check in promises.items():
        try:
            check(adapter)
        except Broken as fault:
            yield AdapterResult(promise, str(fault))
        except ImportError:
            raise
        except Exception as error:
            yield AdapterResult(promise, f"it raised {type(error).__name__}: {error}")
        else:
            yield AdapterResult(promise, "")


def _sources(
    adapter: TrainerAdapter[Any], rollouts: Sequence[Rollout], min_version: int | None = None
) -> list[list[Source]]:
    """Return, for each expected row, the segments that it may be made from."""
    may_train = list(training_rows(rollouts, min_version))
    if adapter.rows_per_rollout == "every":
        return [[source] for source in may_train]
    return [list(group) for _, group in groupby(may_train, key=lambda source: source[0].rollout_id)]


def _pairs(
    adapter: TrainerAdapter[Any], rollouts: Sequence[Rollout] | None = None, min_version: int | None = None
) -> list[tuple[TrainingRow, Source]]:
    """Return each row with the segment that it was made from. Raises Broken if they do not correspond."""
    rollouts = every_kind() if rollouts is None else rollouts
    rows = adapter.read(adapter(rollouts, min_version=min_version))
    expected = _sources(adapter, rollouts, min_version)
    if len(rows) != len(expected):
        raise Broken(f"there are {len(rows)} rows, but {len(expected)} may train")
    return [
        (row, _source(index, row, sources)) for index, (row, sources) in enumerate(zip(rows, expected, strict=True))
    ]


def _source(index: int, row: TrainingRow, sources: Sequence[Source]) -> Source:
    for source in sources:
        if [*row.prompt_ids, *row.response_ids] == [*source[1].prompt_ids.tolist(), *source[1].response_ids.tolist()]:
            return source
    raise Broken(f"row {index} has other tokens than {sources[0][0].rollout_id}, its source")


def _rows_correspond(adapter: TrainerAdapter[Any]) -> None:
    for index, (row, (origin, made_of)) in enumerate(_pairs(adapter)):
        if row.prompt_ids and list(row.prompt_ids) != made_of.prompt_ids.tolist():
            raise Broken(f"row {index} has another prompt than {origin.rollout_id}")
        if row.rollout_id and row.rollout_id != origin.rollout_id:
            raise Broken(f"row {index} names {row.rollout_id}, but is of {origin.rollout_id}")


def _masks(adapter: TrainerAdapter[Any]) -> None:
    for index, (row, (_, made_of)) in enumerate(_pairs(adapter)):
        _equal(index, "mask", row.response_mask, aligned(row, made_of, made_of.response_mask, 0))


def _logprobs(adapter: TrainerAdapter[Any]) -> None:
    pairs = _pairs(adapter)
    if len({row.logprobs is None for row, _ in pairs}) > 1:
        raise Broken("some rows have log-probabilities and others do not")
    for index, (row, (_, made_of)) in enumerate(pairs):
        if row.logprobs is not None:
            _equal(index, "log-probability", row.logprobs, aligned(row, made_of, made_of.response_logprobs, 0.0))


def _versions(adapter: TrainerAdapter[Any]) -> None:
    for index, (row, (_, made_of)) in enumerate(_pairs(adapter)):
        if row.versions is not None:
            _equal(index, "version", row.versions, aligned(row, made_of, made_of.policy_versions, NO_VERSION))


def aligned(row: TrainingRow, made_of: Segment, values: Any, of_prompt: float) -> list[float]:
    """Return the values of a segment's response, preceded by the prompt's if the row has both in one array."""
    expected: list[float] = values.tolist()
    return [of_prompt] * (0 if row.prompt_ids else len(made_of.prompt_ids)) + expected


def _equal(index: int, noun: str, values: Sequence[float], expected: Sequence[float]) -> None:
    if len(values) != len(expected):
        raise Broken(f"row {index} has {len(values)} values of its {noun} for {len(expected)} tokens")
    for position, (value, wanted) in enumerate(zip(values, expected, strict=True)):
        if np.float32(value) != np.float32(wanted):
            raise Broken(f"row {index} has {noun} {value} at {position} instead of {wanted}")


def _rewards(adapter: TrainerAdapter[Any]) -> None:
    for index, (row, (origin, _)) in enumerate(_pairs(adapter)):
        if row.reward is None or np.float32(row.reward) != np.float32(origin.reward):
            raise Broken(f"row {index} has reward {row.reward} instead of {origin.reward} of {origin.rollout_id}")


def _broken_make_no_rows(adapter: TrainerAdapter[Any]) -> None:
    for each in only_broken():
        if rows := adapter.read(adapter([each])):
            raise Broken(f"{each.outcome} without a reward makes {len(rows)} rows, the first with {rows[0].reward}")


def _older_weights_are_left_out(adapter: TrainerAdapter[Any]) -> None:
    for min_version in (7, 8, _NEWEST, _NEWEST + 1):
        _pairs(adapter, min_version=min_version)


def _nothing_makes_no_rows(adapter: TrainerAdapter[Any]) -> None:
    if adapter.read(adapter([])):
        raise Broken("no rollouts make rows")
    if adapter.read(adapter([rollout(0, [])])):
        raise Broken("a rollout without sampled tokens makes rows")


def _rollouts_stay(adapter: TrainerAdapter[Any]) -> None:
    before = every_kind()
    after = deepcopy(before)
    adapter(after)
    for one, other in zip(before, after, strict=True):
        same = replace(one, segments=()) == replace(other, segments=()) and len(one.segments) == len(other.segments)
        pairs = zip(one.segments, other.segments, strict=False)
        if not same or not all(_same(*pair) for pair in pairs):
            raise Broken(f"{one.rollout_id} is changed by the adapter")


def _same(one: Segment, other: Segment) -> bool:
    return all(np.array_equal(getattr(one, each.name), getattr(other, each.name)) for each in fields(Segment))


def _one_rollout_at_a_time(adapter: TrainerAdapter[Any]) -> None:
    for each in every_kind():
        _pairs(adapter, [each])


_PROMISES: dict[str, Callable[[TrainerAdapter[Any]], None]] = {
    "rows are those that may train, in order, and no other": _rows_correspond,
    "a mask is 1 exactly where the policy sampled": _masks,
    "log-probabilities are the recorded ones, for all rows or for none": _logprobs,
    "versions, where a format has them, are the recorded ones": _versions,
    "each row has the reward of its rollout": _rewards,
    "a rollout that broke or was cancelled makes no row": _broken_make_no_rows,
    "rows of older or unknown weights are left out": _older_weights_are_left_out,
    "nothing makes no rows": _nothing_makes_no_rows,
    "rollouts stay as they were": _rollouts_stay,
    "a rollout makes the same rows by itself": _one_rollout_at_a_time,
}
