"""The reward of an episode: the sum of its environment's rewards for each step, and at the end."""

from __future__ import annotations

import math
from typing import ClassVar

from farm.errors import EvaluatorError
from workers.plugins.interfaces import FreshSandbox, Score, Submission


class StepRewardEvaluator:
    """Sums up the rewards recorded by the stage; it reads no text of the policy."""

    name: ClassVar[str] = "step_rewards"

    def __init__(self, environment: str) -> None:
        self._environment = environment

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """Return the sum. Raises EvaluatorError if the rollout did not use the environment, or the sum is infinite."""
        rewards = submission.rewards
        if rewards is None:
            raise EvaluatorError(
                f"there are no rewards of environment {self._environment}: it did not begin, or an agent other than "
                "`environment` ran the rollout"
            )
        total = math.fsum(rewards)
        if not math.isfinite(total):
            raise EvaluatorError(f"the rewards of environment {self._environment} add up to {total}")
        return Score(total, {"environment": self._environment, "rewards": list(rewards)})
