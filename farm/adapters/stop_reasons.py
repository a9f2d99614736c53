"""The words that trainers have for how a rollout ended: each adapter's table of all outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from farm.records.rollout import POLICY_OUTCOMES, Outcome

T = TypeVar("T")

CUT = frozenset({Outcome.MAX_TURNS, Outcome.MAX_TOKENS, Outcome.CONTEXT_FULL, Outcome.DEADLINE})
"""The outcomes of a policy that a limit cut short. A policy that repeated itself was not: trainers leave out or mask
what was cut, and a repetition is to be learnt from."""
ABORTED = frozenset({Outcome.CANCELLED, Outcome.STALE})
_NONE: Mapping[Outcome, T] = MappingProxyType({})  # type: ignore[valid-type]


def reason_table(*, ended: T, cut: T, broken: T, aborted: T, named: Mapping[Outcome, T] = _NONE) -> dict[Outcome, T]:
    """Return a trainer's word for each outcome: `ended` by the policy, `cut` by a limit, `broken` by the farm, or
    `aborted`; `named` has those for which the trainer has a word of its own.
    """

    def word(outcome: Outcome) -> T:
        if outcome in ABORTED:
            return aborted
        if outcome not in POLICY_OUTCOMES:
            return broken
        return cut if outcome in CUT else ended

    return {outcome: named.get(outcome, word(outcome)) for outcome in Outcome}
