"""Evaluators that reward single calls and rows: which evaluators get them, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest

from farm.errors import EvaluatorError
from workers.plugins import plugin_values
from workers.plugins.interfaces import Score, Submission
from workers.stages.stage_functions import rewards_of_rows


@pytest.mark.parametrize(
    "given",
    [
        {"call_rewards": {"0": 1.0}},
        {"call_rewards": {0: math.nan}},
        {"row_rewards": {0: True}},
        {"row_rewards": [1.0]},
        {"call_rewards": {True: 1.0}},
        {"call_rewards": None},
    ],
)
def test_rewards_must_be_finite_numbers_by_index(given: dict[str, Any]) -> None:
    with pytest.raises(EvaluatorError, match=f"e: {next(iter(given))}"):
        plugin_values.score(Score(1.0, **given), "e")


def test_only_evaluators_that_get_the_calls_may_reward_them() -> None:
    score = plugin_values.score(Score(1.0, call_rewards={0: 1}), "e")
    assert score.call_rewards == {0: 1.0}
    with pytest.raises(EvaluatorError, match=r"b1.0.0: evaluator e rewards .* no call 0: .* scores_calls = True"):
        rewards_of_rows("b1.0.0", Submission(), score, "e")
    assert rewards_of_rows("b1.0.0", Submission(), Score(1.0), "e") is None
