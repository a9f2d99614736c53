from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from farm.errors import EvaluatorError
from workers.plugins import plugin_values
from workers.plugins.interfaces import Score


def cycle() -> dict[str, Any]:
    result: dict[str, Any] = {}
    result["itself"] = [result]
    return result


def deep() -> dict[str, Any]:
    result: dict[str, Any] = {}
    for _ in range(100_000):
        result = {"a": result}
    return result


class _Unspeakable:
    def __repr__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    "value",
    [True, False, None, "1", 1j, [1.0], float("nan"), float("inf"), 10**400, Decimal(1), _Unspeakable()],
    ids=lambda value: type(value).__name__,
)
def test_reward_that_is_not_finite_is_the_evaluators_error(value: Any) -> None:
    with pytest.raises(EvaluatorError, match="r1: evaluator mine gave"):
        plugin_values.score(Score(value), "r1: evaluator mine")


@pytest.mark.parametrize(
    "details",
    [
        cycle(),
        deep(),
        {"a": object()},
        {(1, 2): 3},
        {"a": {1, 2}},
        {"a": b"x"},
        {"a": 2**70},
        {"a": "x" * (5 << 20)},
        ["a"],
        None,
        "text",
    ],
    ids=lambda details: type(details).__name__,
)
def test_details_that_are_not_json_are_the_evaluators_error(details: Any) -> None:
    with pytest.raises(EvaluatorError, match="r1: evaluator mine: details"):
        plugin_values.score(Score(1.0, details), "r1: evaluator mine")


@pytest.mark.parametrize(
    ("value", "expected"), [(1, 1.0), (-0.0, 0.0), (Fraction(1, 2), 0.5), (5e-324, 5e-324), (1.7e308, 1.7e308)]
)
def test_finite_numbers_are_rewards(value: Any, expected: float) -> None:
    assert plugin_values.score(Score(value), "r1: evaluator mine").value == expected
