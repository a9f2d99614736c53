"""Tests of the promises of trainer adapters on constructed rollouts of every kind: `farm doctor --adapter NAME`.

They know no trainer's format: an adapter reads its own rows back (`farm.adapters.protocol`), and these are compared
with the segments that they were made from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any, TypeAlias, TypeVar

import numpy as np

from farm.adapters.conformance.constructed_rollouts import every_kind, only_broken, rollout
from farm.adapters.protocol import TrainerAdapter, TrainingRow, training_rows
from farm.records.rollout import Rollout
from farm.records.trajectory import NO_VERSION, Segment

T = TypeVar("T")

Source: TypeAlias = tuple[Rollout, Segment]
_NEWEST = 9


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
