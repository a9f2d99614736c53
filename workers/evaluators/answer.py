"""Scores an answer with the verifier of its problem family, in [0, 1].

A verifier that fails on the policy's text is asked about the reference answer: if that is scored, the text is at
fault and worth 0; if not, scoring is broken, which is an error and never a zero.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from farm.errors import EvaluatorError
from workers.evaluators.grading import Grader, VerifierFailed, shared_grader
from workers.interfaces import FreshSandbox, Score, Submission

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_VERIFIER_S = 20.0


def extract_answer(text: str | None) -> str:
    """The last `<answer>...</answer>` of a text, else all of it; stripped."""
    tagged = _TAGGED.findall(text or "")
    return (tagged[-1] if tagged else text or "").strip()


class AnswerEvaluator:
    """Scores one reasoning-gym entry (`question`, `answer`, `metadata`) of one family."""

    name: ClassVar[str] = "answer"

    def __init__(self, family: str, entry: dict[str, Any], *, grader: Grader | None = None) -> None:
        self._family = family
        self._entry = entry
        self._grader = grader

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """Raises EvaluatorError if the verifier fails on its own reference answer, or scores outside [0, 1]."""
        answer = extract_answer(submission.answer)
        if not answer:
            return Score(0.0, {"reason": "no answer was given"})
        # Half the time for the answer, so that half is left to ask about the reference.
        limit_s = min(_VERIFIER_S, timeout_s / 2)
        try:
            value = await self._score(answer, limit_s)
        except VerifierFailed as failure:
            await self._check_verifier(failure, limit_s)
            return Score(0.0, {"answer": answer[:200], "reason": f"the verifier cannot read the answer: {failure}"})
        if not 0.0 <= value <= 1.0:
            raise EvaluatorError(f"the verifier of {self._family} gave {value}, which is not in [0, 1]")
        return Score(value, {"answer": answer[:200]})

    async def _score(self, answer: str, limit_s: float) -> float:
        return await (self._grader or shared_grader()).score(self._family, self._entry, answer, limit_s)

    async def _check_verifier(self, failure: VerifierFailed, limit_s: float) -> None:
        reference = self._entry.get("answer")
        if reference is None:
            raise EvaluatorError(f"the verifier of {self._family} failed and there is no reference answer: {failure}")
        try:
            await self._score(reference, limit_s)
        except VerifierFailed as broken:
            raise EvaluatorError(f"the verifier of {self._family} fails on its reference answer: {broken}") from None
