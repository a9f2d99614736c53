"""Rewards of tasks with steps: the gate after each, and the total. Source: Harbor's `trial/multi_step.py`.

In addition to Harbor's rule, steps that the policy did not reach, because it hit a limit or broke a step's
preconditions, count as 0: otherwise stopping after an easy step would pay off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from farm.tasks.harbor_config import StepTable
from workers.handlers.harbor.reward_files import MAIN

Rewards: TypeAlias = Mapping[str, float]


def gate(step: StepTable, rewards: Rewards) -> str:
    """Return why a step's `min_reward` ends the task after it; empty if it goes on. A missing key passes no gate."""
    if step.min_reward is None:
        return ""
    least = step.min_reward if isinstance(step.min_reward, dict) else {MAIN: step.min_reward}
    for name, wanted in least.items():
        value = rewards.get(name, -math.inf)
        if value < wanted:
            return f"{name} is {value:g} after step {step.name}, below min_reward {wanted:g}"
    return ""


def total(strategy: Literal["mean", "final"] | None, verified: Sequence[Rewards], n_missing: int) -> dict[str, float]:
    """Return the rewards of a task: of its last step, or the mean of each name over its steps, missing ones as 0.

    `n_missing` counts the steps that the policy failed to reach, not those behind a gate.
    """
    names = dict.fromkeys(name for rewards in verified for name in rewards)
    if strategy == "final":
        return dict.fromkeys(names, 0.0) if n_missing else dict(verified[-1])
    n = len(verified) + n_missing
    return {name: sum(rewards.get(name, 0.0) for rewards in verified) / n for name in names}
