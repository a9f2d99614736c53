"""Scores of functions by the asserts of a row, as in MBPP, which are also the authors' way of scoring."""

from __future__ import annotations

from typing import ClassVar

from workers.evaluators.authors_score import AuthorsScore, with_authors
from workers.evaluators.programs import ProgramEvaluator
from workers.plugins.interfaces import FreshSandbox, Score, Submission

RULE = "asserts"


class AssertsEvaluator:
    """Scores 1.0 if all asserts hold, else 0.0, for both rewards: the asserts run unchanged."""

    name: ClassVar[str] = ProgramEvaluator.name

    def __init__(self, setup: str, check: str, function: str) -> None:
        self._asserts = ProgramEvaluator(setup, check, function)

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """Score the program. Raises EvaluatorError if a fault of the farm ended it, SandboxError without a sandbox."""
        score = await self._asserts.evaluate(submission, fresh, timeout_s)
        return with_authors(score, AuthorsScore(RULE, score.value, right=score.value == 1.0))
