"""Scores of answers by the verifier of their problem family, in [0, 1].

Score 0: text that a verifier would evaluate as a program, and `nan` and `inf`, which break numeric comparisons.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from workers.environments.answer_tags import last_tagged
from workers.evaluators.answers.verification import Verification
from workers.evaluators.grading import NO_SETTINGS, Grader
from workers.plugins.interfaces import FreshSandbox, Score, Submission

_NO_NUMBER = re.compile(r"(?<![a-z])(?:nan|inf|infinity)[ij]?(?![a-z])", re.IGNORECASE)


def extract_answer(text: str | None) -> str:
    """Return the last `<answer>...</answer>` of a text, else all of it; stripped."""
    tagged = last_tagged(text or "")
    return (text or "").strip() if tagged is None else tagged


async def verified(
    family: str, entry: Mapping[str, Any], settings: Mapping[str, Any], answer: str, timeout_s: float
) -> float:
    """Return the score of an answer to an entry of a dataset with some settings. Raises EvaluatorError."""
    return (await AnswerEvaluator(family, dict(entry), settings=settings).score(answer, timeout_s)).value


class AnswerEvaluator:
    """Scores one reasoning-gym entry (`read_request`, `answer`, `metadata`) of one family."""

    name: ClassVar[str] = "answer"

    def __init__(
        self,
        family: str,
        entry: dict[str, Any],
        *,
        settings: Mapping[str, Any] = NO_SETTINGS,
        grader: Grader | None = None,
    ) -> None:
        self._family = family
        self._entry = entry
        self._verification = Verification(family, entry, entry.get("answer"), settings=settings, grader=grader)

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """Score an answer. Raises EvaluatorError if the verifier fails on the reference or scores outside [0, 1]."""
        return await self.score(extract_answer(submission.answer), timeout_s)

    async def score(self, answer: str, timeout_s: float) -> Score:
        """Score an extracted answer; see `evaluate`."""
        if not answer:
            return Score(0.0, {"reason": "no answer was given"})
        if words := self._no_number(answer) or self._other_numbers(answer):
            return Score(0.0, {"answer": answer[:200], "reason": words})
        verified = await self._verification.score(answer, timeout_s)
        reason = {"reason": verified.reason} if verified.reason else {}
        return Score(verified.value, {"answer": answer[:200], **reason})

    def _no_number(self, answer: str) -> str:
        reference = str(self._entry.get("answer") or "")
        # Among words, it may be one of them.
        if not re.search(r"\d", reference) or _NO_NUMBER.search(reference):
            return ""
        no_number = _NO_NUMBER.search(answer)
        return f"{no_number.group()!r} is not a number" if no_number else ""

    def _other_numbers(self, answer: str) -> str:
        """Refuse other numbers in puzzle24, whose verifier accepts any four numbers that make 24, for any puzzle."""
        numbers = self._entry.get("metadata", {}).get("numbers")
        if self._family != "puzzle24" or not isinstance(numbers, list):
            return ""
        used = sorted(int(number) for number in re.findall(r"\d+", answer)[:10])
        return "" if used == sorted(numbers) else f"it is made of the numbers {used}, not of those given"
