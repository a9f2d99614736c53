"""Reward files, `/logs/verifier/reward.json` and `reward.txt`: read strictly, by Harbor's rules.

reward.json takes precedence over reward.txt. A missing, empty, non-numeric or non-finite reward is an EvaluatorError,
not a reward of 0. The rules are those of Harbor's `verifier/verifier.py`; oversized files are refused, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from farm.errors import EvaluatorError

FOLDER = "/logs/verifier"
JSON, TEXT = "reward.json", "reward.txt"
MAIN = "reward"
"""The name of the reward that counts by convention, and of an unnamed reward."""
_MAX_BYTES = 65_536
_MAX_REWARDS = 256


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
