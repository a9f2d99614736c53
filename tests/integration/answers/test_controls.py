"""A score below 1 counts only if the reference answer has 1 under the same conditions: else it is an error."""

from __future__ import annotations

from typing import Any

import pytest

from farm.errors import EvaluatorError
from tests.integration.answers.conftest import Graded, no_sandbox
from workers.evaluators import node_conditions
from workers.evaluators.answer import AnswerEvaluator
from workers.evaluators.answers import equality
from workers.evaluators.grading import Grader
from workers.plugins.interfaces import Submission

INTEGRAL: dict[str, Any] = {
    "question": "Calculate the indefinite integral of 2*x.",
    "answer": "x**2 + C",
    "metadata": {"integrand": "2*x", "variable": "x", "expected_answer_expression": "x**2"},
}


async def scored(grader: Grader, given: str, **other: Any) -> float | None:
    evaluator = AnswerEvaluator("simple_integration", {**INTEGRAL, **other}, grader=grader)
    return (await evaluator.evaluate(Submission(answer=given), no_sandbox, 120.0)).value


def test_verifier_that_rejects_its_reference_is_an_error(graded: Graded) -> None:
    async def use(grader: Grader) -> None:
        assert await scored(grader, "x**2 + 1", answer="x**3 + C") == 1.0, "what is right needs no control"
        with pytest.raises(EvaluatorError, match="simple_integration gives its reference answer 0, not 1"):
            await scored(grader, "x**3", answer="x**3 + C")

    graded(use)


def test_reference_answer_is_scored_once_per_grader_process(graded: Graded, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(grader: Grader) -> list[str]:
        answers: list[str] = []
        score = grader.score

        async def counted(family: str, entry: dict[str, Any], answer: str, *others: Any) -> Any:
            answers.append(answer)
            return await score(family, entry, answer, *others)

        with monkeypatch.context() as patch:
            patch.setattr(grader, "score", counted)
            for answer in ("x", "x**4", "x**2", "x**5"):
                await scored(grader, answer, question="Asked once.")
            await grader.aclose()
            await scored(grader, "x", question="Asked once.")
            await scored(grader, "x**4", question="Asked once.")
        return answers

    # once more by another process, which may run under other conditions
    assert graded(use) == ["x", "x**2 + C", "x**4", "x**2", "x**5", "x", "x**2 + C", "x**4"]


def test_wrong_answer_during_memory_shortage_is_an_error(graded: Graded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library takes its own MemoryError for a wrong answer."""
    monkeypatch.setattr(node_conditions, "shortage", lambda: "the node has no memory left")

    async def use(grader: Grader) -> None:
        assert await scored(grader, "x**2") == 1.0
        with pytest.raises(EvaluatorError, match="the node has no memory left"):
            await scored(grader, "x**3")

    graded(use)


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("deep"), OSError("closed")])
def test_error_in_the_library_is_not_a_wrong_answer(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    from math_verify import grader

    def broken(*_: Any, **__: Any) -> bool:
        raise error

    assert equality.equal("(a-b)^2", {"gold": "a^2+2ab+b^2"}) == 0.0
    monkeypatch.setattr(grader, "sympy_expr_eq", broken)
    with pytest.raises(type(error)):
        equality.equal("(a-b)^2", {"gold": "a^2+2ab+b^2"})
