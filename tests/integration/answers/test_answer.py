from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farm.errors import EvaluatorError
from testkit.deadline import Deadline
from tests.integration.answers.conftest import Graded, entry, no_sandbox
from workers.evaluators.answer import AnswerEvaluator, extract_answer
from workers.evaluators.grading import Grader
from workers.plugins.interfaces import Score, Submission


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 42\n", "42"),
        ("<answer>1</answer> no: <answer>\n2 </answer>.", "2"),
        ("<answer>open", "<answer>open"),
        ("", ""),
        (None, ""),
    ],
)
def test_extract_answer(text: str | None, answer: str) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize("family", ["chain_sum", "gcd", "prime_factorization", "fraction_simplification"])
def test_reference_answer_scores_one(score: Callable[..., Score], family: str) -> None:
    assert score(family, f"I get <answer>{entry(family)['answer']}</answer>").value == 1.0


@pytest.mark.parametrize("answer", ["7", "no idea", "", None])
def test_wrong_answers_score_zero(score: Callable[..., Score], answer: str | None) -> None:
    assert score("chain_sum", answer).value == 0.0


def test_text_that_makes_the_verifier_raise_scores_zero(score: Callable[..., Score]) -> None:
    result = score("prime_factorization", "no idea")
    assert result.value == 0.0
    assert "ValueError" in result.details["reason"]


def test_verifier_that_fails_on_its_reference_is_an_error(score: Callable[..., Score]) -> None:
    with pytest.raises(EvaluatorError, match="fails on its reference answer"):
        score("prime_factorization", "no idea", {**entry("prime_factorization"), "answer": "not a number"})


def test_problem_without_a_reference_answer_is_an_error(score: Callable[..., Score]) -> None:
    with pytest.raises(EvaluatorError, match="there is no reference answer"):
        score("prime_factorization", "no idea", {**entry("prime_factorization"), "answer": None})


HANG = "9**9**9"


def evaluated(expression: str) -> tuple[str, dict[str, Any], str]:
    """Return arguments of `Grader.score` whose verifier evaluates an expression as Python."""
    return "spiral_matrix", entry("spiral_matrix"), expression


def test_text_that_hangs_the_verifier_scores_zero(graded: Graded) -> None:
    async def use(grader: Grader) -> Score:
        evaluator, deadline = AnswerEvaluator(*evaluated("")[:2], grader=grader), Deadline(60.0)
        while True:
            try:
                return await evaluator.evaluate(Submission(answer=HANG), no_sandbox, 60.0)
            except EvaluatorError:
                # as the farm does if the machine was too busy to tell
                if deadline.passed():
                    raise

    score = graded(use)
    assert (score.value, "CPU" in score.details["reason"] or "computed" in score.details["reason"]) == (0.0, True)


def test_text_that_takes_all_memory_scores_zero(graded: Graded) -> None:
    async def use(grader: Grader) -> Score:
        evaluator = AnswerEvaluator(*evaluated("")[:2], grader=grader)
        return await evaluator.evaluate(Submission(answer="[0] * 10**10"), no_sandbox, 40.0)

    assert graded(use).value == 0.0


async def scorer_of(grader: Grader) -> int:
    """Return the process that scores at present."""
    while True:
        await asyncio.sleep(0.01)
        for pid in children(grader.pid) if grader.pid else []:
            return pid


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def score_with_signal(grader: Grader, number: int, of_grader: bool = False) -> None:
    """Score a slow answer, and send a signal to its scorer, or to the grader itself."""
    evaluator = AnswerEvaluator(*evaluated("")[:2], grader=grader)
    scoring = asyncio.create_task(evaluator.evaluate(Submission(answer=HANG), no_sandbox, 12.0))
    scorer = await scorer_of(grader)
    assert grader.pid
    os.kill(grader.pid if of_grader else scorer, number)
    await scoring


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda number: number.name)
def test_signal_to_a_scorer_gives_an_error_and_no_score(graded: Graded, number: int) -> None:
    async def use(grader: Grader) -> None:
        with pytest.raises(EvaluatorError, match="spiral_matrix"):
            await score_with_signal(grader, number)

    graded(use)


def test_killed_grader_gives_no_score_and_is_replaced(graded: Graded) -> None:
    async def use(grader: Grader) -> float | None:
        with pytest.raises(EvaluatorError, match="the grader process died"):
            await score_with_signal(grader, signal.SIGKILL, of_grader=True)
        family, problem, _ = evaluated("")
        return (await grader.score(family, problem, problem["answer"], 20.0)).score

    assert graded(use) == 1.0


def test_concurrent_requests_get_their_own_scores(graded: Graded) -> None:
    problem = entry("chain_sum")
    answers = [problem["answer"] if index % 2 else "wrong" for index in range(20)]

    async def use(grader: Grader) -> list[float | None]:
        result = await asyncio.gather(*[grader.score("chain_sum", problem, answer, 20.0) for answer in answers])
        return [graded.score for graded in result]

    assert graded(use) == [float(index % 2) for index in range(20)]


def test_cancelled_request_does_not_affect_the_next_score(graded: Graded) -> None:
    problem = entry("chain_sum")

    async def use(grader: Grader) -> float | None:
        task = asyncio.create_task(grader.score("chain_sum", problem, "wrong", 20.0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return (await grader.score("chain_sum", problem, problem["answer"], 20.0)).score

    assert graded(use) == 1.0


def test_hanging_answer_does_not_block_another(graded: Graded) -> None:
    async def use(grader: Grader) -> float | None:
        hanging = asyncio.create_task(grader.score(*evaluated(HANG), 10.0))
        await scorer_of(grader)
        problem = entry("chain_sum")
        result = await grader.score("chain_sum", problem, problem["answer"], 20.0)
        assert not hanging.done()
        await hanging
        return result.score

    if (os.cpu_count() or 1) > 1:
        assert graded(use) == 1.0
