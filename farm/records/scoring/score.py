"""The score of a submission, as returned by an evaluator."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Score:
    """A reward with its explanation; `details` is JSON.

    `rewards` are several scores by name; the batch selects the one that counts (`BatchRequest.reward`). By default it
    is `value`, else `rewards["reward"]`, else the only one.

    `call_rewards` and `row_rewards` are rewards of single model calls (turns) and of single training rows, by their
    index in `Submission.calls`: for evaluators of a handler with `scores_calls = True`.
    """

    value: float = math.nan
    details: dict[str, Any] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    call_rewards: dict[int, float] = field(default_factory=dict)
    row_rewards: dict[int, float] = field(default_factory=dict)
