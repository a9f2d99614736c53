"""Selects the reward that counts when a score has several named rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from farm.errors import EvaluatorError
from workers.plugins.interfaces import Score

CONVENTION = "reward"
"""Name of the reward that counts if neither the batch nor the evaluator names one."""


def counting_reward(score: Score, what: str, rule: str | Mapping[str, float] = "") -> Any:
    """Return the reward that counts, unchecked: by the batch's rule, else the evaluator's, else by convention.

    A score of 0 without named rewards is 0 under every rule. Raises EvaluatorError if the score lacks a reward that the
    rule names, or if no rule selects one.
    """
    if not score.rewards and type(score.value) in (int, float) and score.value == 0.0:
        # A score of 0 without named rewards: for example, there was nothing to score.
        return 0.0
    if isinstance(rule, str) and rule:
        return _named(score, what, rule)
    if not isinstance(rule, str):
        try:
            return math.fsum(weight * _named(score, what, key) for key, weight in rule.items())
        except (OverflowError, ValueError):
            # A sum beyond the range of a float, or inf - inf.
            return math.nan
    left_out = isinstance(score.value, float) and math.isnan(score.value)
    if not (left_out and score.rewards):
        return score.value
    if CONVENTION in score.rewards:
        return score.rewards[CONVENTION]
    if len(score.rewards) == 1:
        return next(iter(score.rewards.values()))
    raise EvaluatorError(
        f"{what} gave the rewards {_names(score)}; none of them counts: name one, or weights, in the batch's `reward`"
    )


def _named(score: Score, what: str, key: str) -> float:
    if key not in score.rewards:
        raise EvaluatorError(f"{what} gave no reward {key!r}, which the batch counts; it gave {_names(score)}")
    return score.rewards[key]


def _names(score: Score) -> str:
    return ", ".join(repr(key) for key in sorted(score.rewards)) or "none by name"
