"""Reward files, `/logs/verifier/reward.json` and `reward.txt`: read strictly, by Harbor's rules.

reward.json takes precedence over reward.txt. A missing, empty, non-numeric or non-finite reward is an EvaluatorError,
not a reward of 0. The rules are those of Harbor's `verifier/verifier.py`; oversized files are refused, too.

The total of a task with steps, and the gate after each, follow Harbor's `trial/multi_step.py`; but steps that the
policy did not reach, because it hit a limit or broke a step's preconditions, count as 0: otherwise stopping after an
easy step would pay off.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from farm.errors import EvaluatorError
from farm.tasks.harbor_config import StepTable

FOLDER = "/logs/verifier"
JSON, TEXT = "reward.json", "reward.txt"
MAIN = "reward"
"""The name of the reward that counts by convention, and of an unnamed reward."""
_MAX_BYTES = 65_536
_MAX_REWARDS = 256
Rewards: TypeAlias = Mapping[str, float]


def rewards_of(contents: Mapping[str, bytes]) -> dict[str, float]:
    """Return the rewards in these files, given by file name. Raises EvaluatorError if they contain none."""
    for name, read in ((JSON, _of_json), (TEXT, _of_text)):
        if name in contents:
            data = contents[name]
            if not data.strip():
                raise EvaluatorError(f"{FOLDER}/{name} is empty")
            if len(data) > _MAX_BYTES:
                raise EvaluatorError(f"{FOLDER}/{name} has {len(data)} bytes, more than {_MAX_BYTES} for a reward")
            return read(data)
    raise EvaluatorError(f"the tests wrote neither {FOLDER}/{JSON} nor {TEXT}")


def _of_text(data: bytes) -> dict[str, float]:
    try:
        return {MAIN: _finite(float(data.decode()), TEXT)}
    except ValueError as error:
        raise EvaluatorError(f"{FOLDER}/{TEXT} does not contain a number: {error}") from error


def _of_json(data: bytes) -> dict[str, float]:
    try:
        rewards = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise EvaluatorError(f"{FOLDER}/{JSON} is not JSON: {error}") from error
    if not isinstance(rewards, dict):
        raise EvaluatorError(f"{FOLDER}/{JSON} holds {type(rewards).__name__}, not rewards by name")
    if not rewards or len(rewards) > _MAX_REWARDS:
        raise EvaluatorError(f"{FOLDER}/{JSON} holds {len(rewards)} rewards; the limits are 1 and {_MAX_REWARDS}")
    return {name: _number(each, name) for name, each in rewards.items()}


def _number(value: Any, name: str) -> float:
    # A bool is a number, as in Harbor.
    if not isinstance(value, int | float):
        raise EvaluatorError(f"{FOLDER}/{JSON}: {name:.100} is not a number but {type(value).__name__}")
    try:
        return _finite(float(value), JSON)
    except OverflowError as error:
        raise EvaluatorError(f"{FOLDER}/{JSON}: {name:.100} is too large for a reward") from error


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise EvaluatorError(f"{FOLDER}/{name} holds {value}, which is not a finite number")
    return value


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
