"""The reward that counts: by the batch's rule, else the evaluator's own, else by convention."""

from __future__ import annotations

import math
from typing import Any

import pytest

from farm.errors import EvaluatorError
from workers.plugins import plugin_values
from workers.plugins.interfaces import Score

BOTH = {"tests": 0.5, "style": 1.0}


@pytest.mark.parametrize(
    ("score", "rule", "value"),
    [
        (Score(0.25), "", 0.25),
        (Score(0.25, rewards=BOTH), "", 0.25),
        (Score(0.25, rewards=BOTH), "tests", 0.5),
        (Score(rewards=BOTH), {"tests": 2, "style": -0.5}, 0.5),
        (Score(rewards={**BOTH, "reward": 0.75}), "", 0.75),
        (Score(rewards={"tests": 0.5}), "", 0.5),
        (Score(0.0), "tests", 0.0),
        (Score(0.0), {"tests": 2, "style": 1}, 0.0),
    ],
)
def test_named_reward_counts_as_the_score(score: Score, rule: Any, value: float) -> None:
    assert plugin_values.score(score, "it", rule).value == value


@pytest.mark.parametrize(
    ("score", "rule", "reason"),
    [
        (Score(rewards=BOTH), "", "'style', 'tests'; none of them counts"),
        (Score(rewards=BOTH), "speed", "no reward 'speed', which the batch counts; it gave 'style', 'tests'"),
        (Score(1.0), "tests", "no reward 'tests'.*none by name"),
        (Score(rewards=BOTH), {"tests": 1.0, "speed": 1.0}, "no reward 'speed'"),
        (Score(rewards={"a": 1e308, "b": 1e308}), {"a": 10, "b": -10}, "nan as the reward"),
        (Score(rewards={"a": 1e308}), {"a": 10}, "as the reward"),
        (Score(rewards={"tests": math.nan}), "tests", "nan as the reward 'tests'"),
        (Score(rewards={"tests": True}), "tests", "True as the reward 'tests'"),
        (Score(1.0, rewards={"tests": math.inf}), "", "inf as the reward 'tests'"),
        (Score(), "", "nan as the reward"),
        (Score(rewards={"tests": 1e308}), {"tests": 1e10}, "inf as the reward"),
    ],
)
def test_missing_reward_is_not_replaced_by_another(score: Score, rule: Any, reason: str) -> None:
    with pytest.raises(EvaluatorError, match=reason):
        plugin_values.score(score, "it", rule)
