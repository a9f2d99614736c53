"""The score of a submission, as an evaluator gives it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and how it came about; `details` is JSON.

    `rewards` are several by name, of which the batch says which counts (`BatchRequest.reward`); where it says nothing,
    `value` does, and where that is left out `rewards["reward"]`, or the only one.

    `call_rewards` and `row_rewards` are those of single model calls, which are turns, and of single training rows, by
    their index in `Submission.calls`: for evaluators of a handler with `scores_calls = True`.
    """

    value: float = math.nan
    details: dict[str, Any] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    call_rewards: dict[int, float] = field(default_factory=dict)
    row_rewards: dict[int, float] = field(default_factory=dict)
