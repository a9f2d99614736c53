"""Tests of the promises of adapters that return one result for each rollout, on constructed rollouts.

A trainer learns from these results: an invented reward, or an end reported as another, would be learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from farm.adapters.conformance.adapter_promises import (
    AdapterResult,
    Broken,
    aligned,
    broken,
    calls_of,
    every_kind,
    only_broken,
    rollout,
    segment,
    tried,
)
from farm.adapters.protocol import ResultAdapter, TrainerResult, TrainingRow
from farm.records.rollout import POLICY_OUTCOMES, Outcome, Rollout, State
from farm.records.trajectory import ModelCall, Segment, segments, version_range

Adapter: TypeAlias = ResultAdapter[Any]
_LONG = 64
"""The tokens of the longest response: each sampled stretch is a call."""
_LIMITS = frozenset({Outcome.MAX_TURNS, Outcome.MAX_TOKENS, Outcome.CONTEXT_FULL, Outcome.DEADLINE})
"""Outcomes by a limit that cut the policy short."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A rollout with its model calls, and the resulting training rows."""

    rollout: Rollout
    calls: tuple[ModelCall, ...]

    @property
    def rows(self) -> list[Segment]:
        """The rows that may train."""
        return [each for each in self.rollout.segments if each.trainable] if self.rollout.trainable else []


def examine_results(adapter: Adapter) -> Iterator[AdapterResult]:
    """Test every promise on an adapter. Its errors break the tested promise, except ImportError."""
    return tried(_PROMISES, adapter)


def _given(rollout: Rollout) -> _Given:
    """Return the rollout as the farm would have recorded it from its calls."""
    calls = calls_of(rollout)
    oldest, newest = version_range(calls)
    rows = segments(calls)
    return _Given(replace(rollout, segments=rows, n_segments=len(rows), version_min=oldest, version_max=newest), calls)


def _all() -> list[_Given]:
    return [_given(each) for each in [*every_kind(_LONG), *_policy_ends()]]


def _policy_ends() -> list[Rollout]:
    """Return a rollout for every outcome caused by the policy, with zero and other rewards."""
    ends = sorted(POLICY_OUTCOMES)
    return [rollout(20 + n, [segment(2, [7])], outcome=each, reward=float(n % 2)) for n, each in enumerate(ends)]


def _without_reward() -> list[Rollout]:
    """Return rollouts of which none may train; some were scored before they failed."""
    scored = [
        replace(broken(20, outcome, [segment(2, [7])]), reward=reward)
        for outcome in (Outcome.EVALUATOR_ERROR, Outcome.CANCELLED, Outcome.LOST)
        for reward in (0.0, 1.0)
    ]
    stale = rollout(30, [segment(2, [7])], reward=0.0, outcome=Outcome.STALE, state=State.FAILED)
    return [*only_broken(), *scored, stale]


def _read(adapter: Adapter, given: _Given) -> TrainerResult:
    return adapter.read_result(adapter.result(given.rollout, given.calls))


def _named(adapter: Adapter) -> None:
    for given in [*_all(), *map(_given, _without_reward())]:
        name = _read(adapter, given).rollout_id
        if name not in {"", given.rollout.rollout_id}:
            raise Broken(f"the result of {given.rollout.rollout_id} names {name}")


def _rewards(adapter: Adapter) -> None:
    for given in _all():
        origin, result = given.rollout, _read(adapter, given)
        if not origin.trainable:
            continue
        if result.error or not result.ended:
            raise Broken(f"{origin.rollout_id} ended as {origin.outcome}, but its result is broken: {result.error!r}")
        if result.reward is None or np.float32(result.reward) != np.float32(origin.reward or 0.0):
            raise Broken(f"{origin.rollout_id} has reward {result.reward} instead of {origin.reward}")


def _broken_have_no_reward(adapter: Adapter) -> None:
    for given in map(_given, _without_reward()):
        origin, result = given.rollout, _read(adapter, given)
        if result.reward is not None or result.ended:
            raise Broken(f"{origin.outcome} is reported as an end with reward {result.reward}")
        if origin.rollout_id not in result.error:
            raise Broken(
                f"{origin.outcome} of {origin.rollout_id} has an error that does not name it: {result.error!r}"
            )


def _stop_reasons(adapter: Adapter) -> None:
    reasons = {each.rollout.outcome: _read(adapter, each).stop_reason for each in map(_given, _policy_ends())}
    if missing := [str(outcome) for outcome, reason in reasons.items() if not reason]:
        raise Broken(f"{missing[0]} has no stop reason")
    of_broken = {_read(adapter, _given(each)).stop_reason: each.outcome for each in _without_reward()}
    own = {reason: outcome for outcome, reason in reasons.items() if outcome not in _LIMITS}
    for outcome, reason in reasons.items():
        if reason in of_broken:
            raise Broken(f"{outcome} and {of_broken[reason]}, a failure, have the same stop reason: {reason}")
        if outcome in _LIMITS and reason in own:
            raise Broken(f"{outcome} and {own[reason]}, an end without a limit, have the same stop reason: {reason}")


def _pairs(adapter: Adapter) -> Iterator[tuple[str, TrainingRow, Segment]]:
    """Yield each row of a result with its segment; none if the trainer keeps the tokens itself."""
    results = [(given, _read(adapter, given).rows) for given in _all() if given.rollout.trainable]
    if len({rows is None for _, rows in results}) > 1:
        raise Broken("some results have tokens and others leave them to the trainer")
    for given, rows in results:
        if rows is None:
            continue
        if len(rows) != len(given.rows):
            raise Broken(f"{given.rollout.rollout_id} has {len(rows)} rows, but {len(given.rows)} may train")
        yield from ((given.rollout.rollout_id, row, made_of) for row, made_of in zip(rows, given.rows, strict=True))


def _tokens(adapter: Adapter) -> None:
    for name, row, made_of in _pairs(adapter):
        ids = [*made_of.prompt_ids.tolist(), *made_of.response_ids.tolist()]
        if [*row.prompt_ids, *row.response_ids] != ids:
            raise Broken(f"a row of {name} has other tokens than were recorded")
        _equal(name, "mask", row.response_mask, aligned(row, made_of, made_of.response_mask, 0))


def _logprobs(adapter: Adapter) -> None:
    pairs = list(_pairs(adapter))
    if len({row.logprobs is None for _, row, _ in pairs}) > 1:
        raise Broken("some rows have log-probabilities and others do not")
    for name, row, made_of in pairs:
        if row.logprobs is not None:
            _equal(name, "log-probability", row.logprobs, aligned(row, made_of, made_of.response_logprobs, 0.0))


def _versions(adapter: Adapter) -> None:
    for given in _all():
        origin, versions = given.rollout, _read(adapter, given).versions
        if versions is not None and versions != (origin.version_min, origin.version_max):
            raise Broken(f"{origin.rollout_id} has versions {versions}, not {origin.version_min}, {origin.version_max}")


def _equal(name: str, noun: str, values: Any, expected: list[float]) -> None:
    if len(values) != len(expected) or not np.array_equal(
        np.asarray(values, np.float32), np.asarray(expected, np.float32)
    ):
        raise Broken(f"a row of {name} has another {noun} than was recorded")


def _given_stays(adapter: Adapter) -> None:
    for given in _all():
        before = deepcopy(given)
        adapter.result(given.rollout, given.calls)
        if repr(before) != repr(given):
            raise Broken(f"{given.rollout.rollout_id} is changed by the adapter")


_PROMISES: dict[str, Callable[[Adapter], None]] = {
    "a result names its own rollout, or none": _named,
    "a rollout that the policy ended has its own reward": _rewards,
    "a rollout that broke, was cancelled or is stale has no reward, and an error that names it": _broken_have_no_reward,
    "each end of the policy has a stop reason, a limit one of its own, and none is that of what broke": _stop_reasons,
    "tokens, for all results or for none, are the recorded ones that may train, with their masks": _tokens,
    "log-probabilities are the recorded ones, for all rows or for none": _logprobs,
    "versions, where a format has them, are the recorded ones": _versions,
    "rollouts and calls stay as they were": _given_stays,
}
