"""Right answers in many notations score 1, and a wrong one in each of these notations 0, with math-verify."""

from __future__ import annotations

import asyncio

import pytest

from farm.errors import EvaluatorError
from tests.acceptance.scores import honest_choices
from tests.acceptance.scores.honest_answers import HONEST, TWINS
from tests.integration.answers.conftest import no_sandbox
from workers.evaluators.answers.equality import FAMILY
from workers.evaluators.answers.equivalence import EquivalenceEvaluator
from workers.evaluators.answers.reference import Reference
from workers.evaluators.grading import Grader
from workers.handlers.answer_handler import AnswerInstance
from workers.plugins.interfaces import Submission

N_HONEST, N_TWINS = 40, 15
N_ATTEMPTS = 60


def scored(pairs: list[tuple[Reference, str]]) -> list[tuple[str, str, float | None]]:
    """Return the gold answers, the responses and their scores, None for errors; all by one grader."""

    async def score(reference: Reference, response: str, grader: Grader) -> tuple[str, str, float | None]:
        evaluator = EquivalenceEvaluator(reference, grader=grader)
        try:
            value = (await evaluator.evaluate(Submission(answer=response), no_sandbox, 240.0)).value
        except EvaluatorError:
            return reference.gold, response, None
        return reference.gold, response, value

    async def main() -> list[tuple[str, str, float | None]]:
        grader = Grader(FAMILY)
        try:
            return [await score(reference, response, grader) for reference, response in pairs]
        finally:
            await grader.aclose()

    return asyncio.run(main())


def boxed(corpus: dict[str, tuple[str, ...]]) -> list[tuple[Reference, str]]:
    return [(Reference("q", gold), f"So \\boxed{{{answer}}}") for gold, answers in corpus.items() for answer in answers]


@pytest.mark.parametrize("kind", HONEST)
def test_right_answers_score_one(kind: str) -> None:
    pairs = boxed(HONEST[kind])
    assert len(pairs) >= N_HONEST
    assert [each for each in scored(pairs) if each[2] != 1.0] == []


@pytest.mark.parametrize("kind", TWINS)
def test_wrong_answers_in_the_same_notations_score_zero(kind: str) -> None:
    pairs = boxed(TWINS[kind])
    assert len(pairs) >= N_TWINS
    assert [each for each in scored(pairs) if each[2] != 0.0] == []


def test_options_are_recognised_in_any_phrasing() -> None:
    right, wrong = (
        [(Reference("q", "C", honest_choices.OPTIONS), response) for response in responses]
        for responses in (honest_choices.HONEST, honest_choices.WRONG)
    )
    assert len(right) >= N_HONEST
    assert [each for each in scored(right) if each[2] != 1.0] == []
    assert [each for each in scored(wrong) if each[2] != 0.0] == []


def test_corpus_has_enough_wrong_answers() -> None:
    wrong = sum(len(answers) for golds in TWINS.values() for answers in golds.values())
    assert wrong + len(honest_choices.WRONG) >= N_ATTEMPTS


@pytest.mark.parametrize("gold", ["}{", r"\frac{1}{", "{"])
def test_gold_answer_with_unbalanced_braces_is_refused(gold: str) -> None:
    with pytest.raises(ValueError, match="unbalanced braces"):
        AnswerInstance(question="q", gold=gold)
