"""Scores of answers by the verifier of their problem family, in [0, 1].

Text that a verifier would evaluate as a program, and `nan` and `inf`, which compare as no number does, score 0. After a
verifier has failed on the policy's text, it is run on the reference answer: if that is scored, the text is at fault and
scores 0; if not, scoring is broken, which is an error and never a zero. `process_end.py` decides what caused the end of
a scorer, with the reference answer as the control.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from farm.errors import EvaluatorError
from workers.evaluators.grading import Graded, Grader, shared_grader
from workers.evaluators.process_end import Trial, doing, settle
from workers.interfaces import FreshSandbox, Score, Submission

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NO_NUMBER = re.compile(r"(?<![a-z])(?:nan|inf|infinity)[ij]?(?![a-z])", re.IGNORECASE)
_VERIFIER_S = 120.0
"""Seconds of wall time for a verifier, of which it may compute for a few."""


def extract_answer(text: str | None) -> str:
    """Return the last `<answer>...</answer>` of a text, else all of it; stripped."""
    tagged = _TAGGED.findall(text or "")
    return (tagged[-1] if tagged else text or "").strip()


class AnswerEvaluator:
    """Scores one reasoning-gym entry (`read_request`, `answer`, `metadata`) of one family."""

    name: ClassVar[str] = "answer"

    def __init__(self, family: str, entry: dict[str, Any], *, grader: Grader | None = None) -> None:
        self._family = family
        self._entry = entry
        self._grader = grader

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """Score an answer. Raises EvaluatorError if the verifier fails on the reference or scores outside [0, 1]."""
        answer = extract_answer(submission.answer)
        if not answer:
            return Score(0.0, {"reason": "no answer was given"})
        if words := self._no_number(answer) or self._other_numbers(answer):
            return Score(0.0, {"answer": answer[:200], "reason": words})
        # An answer is verified twice at most, and the reference as often.
        limit_s = min(_VERIFIER_S, timeout_s / 4)
        graded = await settle(
            lambda: self._trial(answer, limit_s), lambda: self._control(limit_s), f"the verifier of {self._family}"
        )
        return await self._score(graded, answer, limit_s)

    def _no_number(self, answer: str) -> str:
        reference = str(self._entry.get("answer") or "")
        # among words it may be one
        if not re.search(r"\d", reference) or _NO_NUMBER.search(reference):
            return ""
        no_number = _NO_NUMBER.search(answer)
        return f"{no_number.group()!r} is no number" if no_number else ""

    def _other_numbers(self, answer: str) -> str:
        """Refuse other numbers in puzzle24, whose verifier accepts any four numbers that make 24 for any puzzle."""
        numbers = self._entry.get("metadata", {}).get("numbers")
        if self._family != "puzzle24" or not isinstance(numbers, list):
            return ""
        used = sorted(int(number) for number in re.findall(r"\d+", answer)[:10])
        return "" if used == sorted(numbers) else f"it is made of the numbers {used}, not of those given"

    async def _trial(self, answer: str, limit_s: float) -> Trial[Graded]:
        graded = await self._ask(answer, limit_s)
        return Trial(graded, graded.end, passed=graded.replied)

    async def _control(self, limit_s: float) -> str:
        graded = await self._ask(str(self._entry.get("answer") or "0"), limit_s)
        return "" if graded.replied else f"a scorer of the reference answer: {graded.end.kind}"

    async def _score(self, graded: Graded, answer: str, limit_s: float) -> Score:
        details = {"answer": answer[:200]}
        if graded.refused:
            reason = f"the verifier would evaluate it, and it has {graded.refused}; use literals and arithmetic"
            return Score(0.0, {**details, "reason": reason})
        if graded.score is None:
            failure = graded.error or doing(graded.end)[1]
            await self._check_verifier(failure, limit_s)
            return Score(0.0, {**details, "reason": f"the verifier cannot read the answer: {failure}"})
        if not 0.0 <= graded.score <= 1.0:
            raise EvaluatorError(f"the verifier of {self._family} gave {graded.score}, which is not in [0, 1]")
        return Score(graded.score, details)

    async def _ask(self, answer: str, limit_s: float) -> Graded:
        return await (self._grader or shared_grader()).score(self._family, self._entry, answer, limit_s)

    async def _check_verifier(self, failure: str, limit_s: float) -> None:
        reference = self._entry.get("answer")
        if reference is None:
            raise EvaluatorError(f"the verifier of {self._family} failed and there is no reference answer: {failure}")
        graded = await self._ask(reference, limit_s)
        if graded.score is None:
            broken = graded.error or graded.refused or graded.end.kind
            raise EvaluatorError(f"the verifier of {self._family} fails on its reference answer: {broken}")
