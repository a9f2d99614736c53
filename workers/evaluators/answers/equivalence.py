"""Scores of answers to math, STEM and multiple-choice requests: rules first, then math-verify, then a judge.

A rule's "equal" is final. A rule's "different" is final where it is certain: for an option, for a plain number that is
far off, and for mathematics if there is no judge.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from farm.errors import EvaluatorError
from workers.evaluators.answers import equality
from workers.evaluators.answers.authors.rules import (
    LIBRARY,
    OF_WORDS,
    OUT_OF_SENTENCES,
    RULES,
    else_marked,
)
from workers.evaluators.answers.authors.sympy_rules import SYMPY_RULES
from workers.evaluators.answers.final_answer import (
    NONE_NAMED,
    FinalAnswer,
    chosen,
    closing_boxes,
    final_answer,
    last_line,
    of_text,
    sentence_end,
)
from workers.evaluators.answers.judge import AnswerJudge
from workers.evaluators.answers.normal_text import (
    balanced,
    claimed_values,
    ends_in_glued_letter,
    has_words,
    number_and_unit,
    plain,
    same_words,
    whole_number,
    words,
)
from workers.evaluators.answers.notation import conventional, is_value, measure, operations_left
from workers.evaluators.answers.reference import Reference
from workers.evaluators.answers.verification import Verification
from workers.evaluators.authors_score import AuthorsScore, with_authors
from workers.evaluators.grading import Grader
from workers.plugins.interfaces import FreshSandbox, Score, Submission

_SHOWN = 500
_REMARK = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")
_NO_BRACKET = re.compile(r"[^()\[\]]")
_FAR = 0.05
"""The relative difference beyond which two plain numbers differ by more than rounding."""
_ROUNDED = 1e-3
"""The relative difference up to which the numbers of one answer count as one value."""


class EquivalenceEvaluator:
    """Scores 1.0 for an answer equivalent to the gold answer, else 0.0. Without a judge, only rules decide."""

    name: ClassVar[str] = "equivalence"

    def __init__(self, reference: Reference, judge: AnswerJudge | None = None, *, grader: Grader | None = None) -> None:
        self._reference = reference
        self._judge = judge
        self._grader = grader

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """Score an answer. Raises EvaluatorError if a gold answer or the judge's replies are unreadable."""
        reference = self._reference
        if not reference.rule:
            return await self._score(self._final_answer(submission.answer), submission.answer, timeout_s)
        response = submission.answer or ""
        if reference.rule == LIBRARY:
            authors = await self._by_grader(equality.WHOLE_RESPONSE, response if response.strip() else None, timeout_s)
            authors = replace(authors, answer=None)
        elif reference.rule in SYMPY_RULES:
            answer = SYMPY_RULES[reference.rule].find(response)
            authors = await self._by_grader(reference.rule, answer, timeout_s)
        else:
            authors = RULES[reference.rule](response, reference)
        return with_authors(await self._with_authors_answer(authors, submission.answer, timeout_s), authors)

    async def _by_grader(self, family: str, answer: str | None, timeout_s: float) -> AuthorsScore:
        verification = Verification(family, {"gold": self._reference.gold}, None, grader=self._grader)
        value = 0.0 if answer is None else (await verification.score(answer, timeout_s)).value
        return AuthorsScore(self._reference.rule, value, value == 1.0, answer)

    def _final_answer(self, response: str | None) -> FinalAnswer:
        """Return the match of the row's first pattern that finds any; without patterns, the final answer."""
        patterns = (self._reference.pattern, *self._reference.other_patterns)
        answers = (final_answer(response, pattern) for pattern in patterns)
        return next((answer for answer in answers if answer.text), FinalAnswer())

    async def _with_authors_answer(self, authors: AuthorsScore, response: str | None, timeout_s: float) -> Score:
        """Score the answer that the authors' scorer extracts, by the farm's stricter and broader rules.

        If it extracts none, or only a part, or only a letter is requested, the farm's own marks determine the answer.
        """
        if self._reference.options:
            of_pattern = self._final_answer(response)
            answer = of_pattern if of_pattern.text else final_answer(response)
            return await self._score(answer, response, timeout_s, authors.answer or "")
        marked = authors.answer or else_marked(self._reference.rule, response or "")
        own = final_answer(response)
        of_sentences = self._reference.rule in OUT_OF_SENTENCES
        own_first = of_sentences and (own.marked or not authors.right)
        answer = of_text(marked) if marked and not own_first else own
        of_words = self._reference.rule in OF_WORDS
        golds = [gold for gold in self._reference.golds if same_words(answer.text, gold)]
        if of_sentences:
            # As words, and by the authors' rule, a closed interval equals an open one.
            golds = [gold for gold in golds if _brackets(answer.text) == _brackets(gold)]
        if golds and (of_words or authors.right):
            return Score(1.0, {"answer": plain(answer.text)[:_SHOWN], "rule": "equal words"})
        if of_words:
            return Score(0.0, {"answer": plain(answer.text)[:_SHOWN], "rule": "other words"})
        return await self._score(answer, response, timeout_s)

    async def _score(self, answer: FinalAnswer, response: str | None, timeout_s: float, else_letter: str = "") -> Score:
        shown = {"answer": plain(answer.text)[:_SHOWN]}
        if self._reference.options:
            return self._choice(answer, response, shown, else_letter)
        candidate = answer.text or (response or "").strip() * (self._judge is not None)
        if not candidate:
            return Score(0.0, {**shown, "reason": "no answer is marked by \\boxed{} or a line `Answer:`"})
        why = ""
        boxes = closing_boxes(response)
        for gold in self._reference.golds:
            # One value per box.
            text = ", ".join(boxes) if 1 < len(boxes) == len(gold.split(",")) else answer.text
            decided, why = (None, "") if not text else await self._by_rules(text, gold, timeout_s)
            if decided:
                return Score(1.0, {**shown, "rule": why})
            if decided is None and self._judge is not None:
                decision = await self._judge.equal(self._reference.request, gold, candidate)
                if decision.equal or gold == self._reference.golds[-1]:
                    return Score(float(decision.equal), {**shown, "rule": "judge", "judge": decision.details})
        return Score(0.0, {**shown, "rule": why})

    def _choice(self, answer: FinalAnswer, response: str | None, shown: dict[str, Any], else_letter: str) -> Score:
        """Score the option that an answer names; `else_letter` is the authors' reading if it names none."""
        reference = self._reference
        # Scorers of such data sets search for a sentence in the last line.
        text = answer.text or ("" if reference.pattern else sentence_end(last_line(response)))
        letter, why = chosen(text, reference.options) if text else ("", "no answer is marked")
        if not letter and why in ("", NONE_NAMED, "no answer is marked"):
            letter = else_letter
        by_text = not letter and words(answer.text).casefold() in {
            words(gold).casefold() for gold in reference.other_golds
        }
        right = by_text or letter == reference.gold
        return Score(float(right), {**shown, "rule": "option", **({"reason": why} if why else {})})

    async def _by_rules(self, answer: str, gold: str, timeout_s: float) -> tuple[bool | None, str]:
        """Return whether it is equivalent, None if rules cannot decide, and the deciding rule."""
        gold, answer = conventional(gold), conventional(answer)
        if not balanced(gold):
            raise EvaluatorError(f"the gold answer {gold[:100]!r} has unbalanced braces, which no answer can have")
        if words(answer) == words(gold):
            return True, "equal text"
        gold_number, answer_number = number_and_unit(gold), number_and_unit(answer)
        if gold_number and answer_number and not ("%" in gold or "%" in answer):
            same_unit = (
                gold_number[1] == answer_number[1]
                or (not gold_number[1] and self._judge is None and not ends_in_glued_letter(answer))
                or _same(measure(gold_number[1]), measure(answer_number[1]))
            )
            whole = whole_number(gold), whole_number(answer)
            equal = (
                whole[0] == whole[1]
                if None not in whole
                else math.isclose(gold_number[0], answer_number[0], rel_tol=1e-9)
            )
            if same_unit and equal:
                return True, "equal number"
            if (
                not gold_number[1]
                and not answer_number[1]
                and not math.isclose(gold_number[0], answer_number[0], rel_tol=_FAR, abs_tol=1e-12)
            ):
                return False, "another number"
            if _same(measure(gold_number[1]), measure(answer_number[1])) is False:
                return None, "another unit"
        if (
            gold_number
            and (values := claimed_values(answer))
            and max(values) - min(values) > _ROUNDED * max(map(abs, values))
        ):
            return None, "several values"
        if has_words(gold):
            return None, "other words"
        if not balanced(answer):
            return None, "braces that do not match"
        entry = {"gold": plain(gold) if gold.strip().startswith("\\text") else gold.strip().strip("$")}
        try:
            verified = await Verification(equality.FAMILY, entry, entry["gold"], grader=self._grader).score(
                _spelt_out(answer), timeout_s
            )
        except EvaluatorError as error:
            if equality.UNREADABLE in str(error):
                return None, f"other text, and {equality.UNREADABLE}"
            raise EvaluatorError(f"comparing with the gold answer {gold[:100]!r}: {error}") from error
        if verified.value == 1.0:
            wants_value = is_value(gold) if self._reference.evaluated is None else self._reference.evaluated
            left = operations_left(answer, gold) if wants_value else set()
            return (False, "not evaluated") if left else (True, equality.FAMILY)
        return None, verified.reason or f"not equal by {equality.FAMILY}"


def _brackets(text: str) -> str:
    return _NO_BRACKET.sub("", text)


def _same(one: Mapping[str, int] | None, other: Mapping[str, int] | None) -> bool | None:
    return None if one is None or other is None else one == other


def _spelt_out(answer: str) -> str:
    """Return an answer with its remarks in words if they contain more than a unit: the library drops remarks."""
    remarks = _REMARK.findall(answer)
    plain_unit = all(number_and_unit(f"1 {remark}") for remark in remarks)
    return answer.strip().strip("$") if plain_unit else plain(answer)
