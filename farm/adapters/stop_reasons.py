"""Trainers' words for the end of a rollout: each adapter's table of all outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from farm.records.rollout import POLICY_OUTCOMES, Outcome

T = TypeVar("T")

CUT = frozenset({Outcome.MAX_TURNS, Outcome.MAX_TOKENS, Outcome.CONTEXT_FULL, Outcome.DEADLINE})
"""Outcomes of a policy that a limit cut short. A policy that repeated itself is not included: trainers leave out or
mask truncated rollouts, but should learn from a repetition."""
ABORTED = frozenset({Outcome.CANCELLED, Outcome.STALE})
_NONE: Mapping[Outcome, T] = MappingProxyType({})  # type: ignore[valid-type]


def reason_table(*, ended: T, cut: T, broken: T, aborted: T, named: Mapping[Outcome, T] = _NONE) -> dict[Outcome, T]:
    """Return a trainer's word for each outcome: `ended` by the policy, `cut` by a limit, `broken` by the farm, or
    `aborted`. `named` overrides single outcomes for which the trainer has its own word.
    """

    def word(outcome: Outcome) -> T:
        if outcome in ABORTED:
            return aborted
        if outcome not in POLICY_OUTCOMES:
            return broken
        return cut if outcome in CUT else ended

    return {outcome: named.get(outcome, word(outcome)) for outcome in Outcome}
