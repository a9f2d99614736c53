"""Scores of answers to math, STEM and multiple-choice requests: rules first, then math-verify, then a judge.

A rule that says yes is final. A rule that says no is final where it can know: for an option, for a plain number that is
far off, and for mathematics that no judge is asked about.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from farm.errors import EvaluatorError
from workers.evaluators.answers import equality
from workers.evaluators.answers.choices import chosen, said, strictly_chosen
from workers.evaluators.answers.final_answer import FinalAnswer, final_answer, last_line
from workers.evaluators.answers.judge import AnswerJudge
from workers.evaluators.answers.normal_text import (
    balanced,
    claimed_values,
    has_words,
    number_and_unit,
    plain,
    words,
)
from workers.evaluators.answers.notation import conventional
from workers.evaluators.answers.operations import is_value, operations_left
from workers.evaluators.answers.units import measure
from workers.evaluators.answers.verification import Verification
from workers.evaluators.grading import Grader
from workers.interfaces import FreshSandbox, Score, Submission

_SHOWN = 500
_REMARK = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")
_FAR = 0.05
"""The relative difference beyond which two plain numbers are no matter of rounding."""
_ROUNDED = 1e-3
"""The relative difference up to which the numbers of one answer are one value."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The request and its gold answer; with `options`, the letter of one. `pattern` finds the final answer.

    `evaluated`: an answer that leaves operations to its reader which the gold answer has not is wrong; None for that
    where the gold answer is a number.
    """

    request: str
    gold: str
    options: Sequence[str] = ()
    strict: bool = False
    """Only a single letter in a mark is taken for an option."""
    pattern: str = ""
    evaluated: bool | None = None


class EquivalenceEvaluator:
    """Scores 1.0 for an answer that is equivalent to the gold answer, else 0.0. Without a judge, rules alone decide."""

    name: ClassVar[str] = "equivalence"

    def __init__(self, reference: Reference, judge: AnswerJudge | None = None, *, grader: Grader | None = None) -> None:
        self._reference = reference
        self._judge = judge
        self._grader = grader

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """Score an answer. Raises EvaluatorError if the gold answer or the judge's replies cannot be read."""
        answer = final_answer(submission.answer, self._reference.pattern)
        shown = {"answer": plain(answer.text)[:_SHOWN]}
        if self._reference.options:
            return self._choice(answer, submission.answer, shown)
        candidate = answer.text or (submission.answer or "").strip() * (self._judge is not None)
        if not candidate:
            return Score(0.0, {**shown, "reason": "no answer is marked by \\boxed{} or a line `Answer:`"})
        decided, why = (None, "") if not answer.text else await self._by_rules(answer.text, timeout_s)
        if decided is None and self._judge is not None:
            decision = await self._judge.equal(self._reference.request, self._reference.gold, candidate)
            return Score(float(decision.equal), {**shown, "rule": "judge", "judge": decision.details})
        return Score(float(bool(decided)), {**shown, "rule": why})

    def _choice(self, answer: FinalAnswer, response: str | None, shown: dict[str, Any]) -> Score:
        reference = self._reference
        if reference.strict:
            text = plain(answer.text) if answer.marked else ""
            letter, why = strictly_chosen(text, len(reference.options))
        else:
            # the scorers of such data sets look for a sentence in the last line
            text = answer.text or ("" if reference.pattern else said(last_line(response)))
            letter, why = chosen(text, reference.options) if text else ("", "no answer is marked")
        return Score(float(letter == reference.gold), {**shown, "rule": "option", **({"reason": why} if why else {})})

    async def _by_rules(self, answer: str, timeout_s: float) -> tuple[bool | None, str]:
        """Return whether it is equivalent, None if rules cannot tell, and the rule that decided."""
        gold, answer = conventional(self._reference.gold), conventional(answer)
        if not balanced(gold):
            raise EvaluatorError(f"the gold answer {gold[:100]!r} has braces that do not match, as no answer can have")
        if words(answer) == words(gold):
            return True, "equal text"
        ours, theirs = number_and_unit(gold), number_and_unit(answer)
        if ours and theirs and not ("%" in gold or "%" in answer):
            same_unit = (
                ours[1] == theirs[1]
                or (not ours[1] and self._judge is None)
                or _same(measure(ours[1]), measure(theirs[1]))
            )
            if same_unit and math.isclose(ours[0], theirs[0], rel_tol=1e-9):
                return True, "equal number"
            if not ours[1] and not theirs[1] and not math.isclose(ours[0], theirs[0], rel_tol=_FAR, abs_tol=1e-12):
                return False, "another number"
            if _same(measure(ours[1]), measure(theirs[1])) is False:
                return None, "another unit"
        if ours and (values := claimed_values(answer)) and max(values) - min(values) > _ROUNDED * max(map(abs, values)):
            return None, "several values"
        if has_words(gold):
            return None, "other words"
        if not balanced(answer):
            return None, "braces that do not match"
        entry = {"gold": plain(gold) if _is_text(gold) else gold.strip().strip("$")}
        try:
            verified = await Verification(equality.FAMILY, entry, entry["gold"], grader=self._grader).score(
                _spelt_out(answer), timeout_s
            )
        except EvaluatorError as error:
            if equality.UNREADABLE in str(error):
                return None, f"other text, and {equality.UNREADABLE}"
            raise EvaluatorError(f"compared with the gold answer {gold[:100]!r}: {error}") from error
        if verified.value == 1.0:
            left = operations_left(answer, gold) if self._wants_value(gold) else set()
            return (False, "not evaluated") if left else (True, equality.FAMILY)
        return None, verified.reason or f"not equal by {equality.FAMILY}"

    def _wants_value(self, gold: str) -> bool:
        return is_value(gold) if self._reference.evaluated is None else self._reference.evaluated


def _same(ours: Mapping[str, int] | None, theirs: Mapping[str, int] | None) -> bool | None:
    """Return whether two units are the same, None if one is not known."""
    return None if ours is None or theirs is None else ours == theirs


def _is_text(text: str) -> bool:
    return text.strip().startswith("\\text")


def _spelt_out(answer: str) -> str:
    """Return an answer with its remarks in words if they say more than a unit: the library drops remarks."""
    remarks = _REMARK.findall(answer)
    plain_unit = all(number_and_unit(f"1 {remark}") for remark in remarks)
    return answer.strip().strip("$") if plain_unit else plain(answer)
