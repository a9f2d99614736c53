from __future__ import annotations

from typing import Literal

import pytest

from farm.tasks.harbor_config import StepTable
from workers.handlers.harbor.reward_files import gate, total


@pytest.mark.parametrize(
    ("least", "rewards", "passes"),
    [
        (None, {}, True),
        (1.0, {"reward": 1.0}, True),
        (0.5, {"reward": 0.4}, False),
        (-5.0, {"other": 1.0}, False),
        ({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}, True),
        ({"a": 1.0, "b": 0.0}, {"a": 1.0}, False),
    ],
)
def test_gate_requires_all_its_rewards(
    least: float | dict[str, float] | None, rewards: dict[str, float], passes: bool
) -> None:
    assert (gate(StepTable(name="s", min_reward=least), rewards) == "") is passes


@pytest.mark.parametrize(
    ("strategy", "verified", "n_missing", "result"),
    [
        (None, [{"reward": 1.0}], 0, {"reward": 1.0}),
        ("mean", [{"reward": 1.0}, {"reward": 0.0, "x": 1.0}], 0, {"reward": 0.5, "x": 0.5}),
        ("final", [{"reward": 0.0}, {"reward": 1.0}], 0, {"reward": 1.0}),
        # stopping early, or breaking the state for the next step, does not pay off
        ("mean", [{"reward": 1.0}], 3, {"reward": 0.25}),
        ("final", [{"reward": 1.0}], 1, {"reward": 0.0}),
    ],
)
def test_step_rewards_are_totalled(
    strategy: Literal["mean", "final"] | None,
    verified: list[dict[str, float]],
    n_missing: int,
    result: dict[str, float],
) -> None:
    assert total(strategy, verified, n_missing) == result
