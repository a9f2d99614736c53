"""The rule for the reward that counts, of a score that has several by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from farm.errors import EvaluatorError
from workers.plugins.interfaces import Score

CONVENTION = "reward"
"""The name that counts where neither the batch nor the evaluator names one."""


def counting_reward(score: Score, what: str, rule: str | Mapping[str, float] = "") -> Any:
    """Return the reward that counts, unchecked: by the batch's rule, else the evaluator's own, else by convention.

    A score of 0 without any reward by name is 0 by every rule.
    Raises EvaluatorError naming a reward that the rule asks for and the score has not, or all of them if none counts.
    """
    if not score.rewards and type(score.value) in (int, float) and score.value == 0.0:
        # nothing was left to give rewards to by name
        return 0.0
    if isinstance(rule, str) and rule:
        return _named(score, what, rule)
    if not isinstance(rule, str):
        try:
            return math.fsum(weight * _named(score, what, key) for key, weight in rule.items())
        except (OverflowError, ValueError):
            # beyond what a float holds, or infinite both ways
            return math.nan
    left_out = isinstance(score.value, float) and math.isnan(score.value)
    if not (left_out and score.rewards):
        return score.value
    if CONVENTION in score.rewards:
        return score.rewards[CONVENTION]
    if len(score.rewards) == 1:
        return next(iter(score.rewards.values()))
    raise EvaluatorError(
        f"{what} gave the rewards {_names(score)} and none that counts: name one, or weights, by the batch's `reward`"
    )


def _named(score: Score, what: str, key: str) -> float:
    if key not in score.rewards:
        raise EvaluatorError(f"{what} gave no reward {key!r}, which the batch counts; it gave {_names(score)}")
    return score.rewards[key]


def _names(score: Score) -> str:
    return ", ".join(repr(key) for key in sorted(score.rewards)) or "none by name"
