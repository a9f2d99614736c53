from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import pytest
import reasoning_gym

from farm.errors import EvaluatorError
from workers.evaluators.answer import AnswerEvaluator, extract_answer
from workers.evaluators.grading import Grader, VerifierFailed
from workers.interfaces import Sandbox, Score, Submission

Graded: TypeAlias = Callable[[Callable[[Grader], Awaitable[Any]]], Any]


def no_sandbox() -> AbstractAsyncContextManager[Sandbox]:
    raise AssertionError("answers are scored without a sandbox")


def entry(family: str) -> dict[str, Any]:
    made: dict[str, Any] = reasoning_gym.create_dataset(family, size=1, seed=3)[0]
    return made


@pytest.fixture(scope="module")
def graded() -> Iterator[Graded]:
    """Runs what uses a grader; all use the same one, as its process takes seconds to start."""
    with asyncio.Runner() as runner:
        grader = Grader()

        async def use_it(use: Callable[[Grader], Awaitable[Any]]) -> Any:
            return await use(grader)

        yield lambda use: runner.run(use_it(use))
        runner.run(grader.aclose())


@pytest.fixture(scope="module")
def score(graded: Graded) -> Callable[..., Score]:
    def scored(family: str, answer: str | None, problem: dict[str, Any] | None = None) -> Score:
        async def use(grader: Grader) -> Score:
            evaluator = AnswerEvaluator(family, problem or entry(family), grader=grader)
            return await evaluator.evaluate(Submission(answer=answer), no_sandbox, 30.0)

        result: Score = graded(use)
        return result

    return scored


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
def test_the_reference_scores_one(score: Callable[..., Score], family: str) -> None:
    assert score(family, f"I get <answer>{entry(family)['answer']}</answer>").value == 1.0


@pytest.mark.parametrize("answer", ["7", "no idea", "", None])
def test_wrong_answers_score_zero(score: Callable[..., Score], answer: str | None) -> None:
    assert score("chain_sum", answer).value == 0.0


def test_text_that_makes_the_verifier_raise_is_worth_zero(score: Callable[..., Score]) -> None:
    found = score("prime_factorization", "no idea")
    assert found.value == 0.0
    assert "ValueError" in found.details["reason"]


def test_a_verifier_that_fails_on_its_reference_is_an_error(score: Callable[..., Score]) -> None:
    with pytest.raises(EvaluatorError, match="fails on its reference answer"):
        score("prime_factorization", "no idea", {**entry("prime_factorization"), "answer": "not a number"})


def test_without_a_reference_nobody_can_tell(score: Callable[..., Score]) -> None:
    with pytest.raises(EvaluatorError, match="there is no reference answer"):
        score("prime_factorization", "no idea", {**entry("prime_factorization"), "answer": None})


HANG = "[sum(iter(int, 1))]"
DIE = "[__import__('os')._exit(3)]"


def evaluated(expression: str) -> tuple[str, dict[str, Any], str]:
    """Arguments of `Grader.score` whose verifier evaluates an expression as Python."""
    return "spiral_matrix", entry("spiral_matrix"), expression


@pytest.mark.parametrize(("answer", "limit_s"), [(HANG, 1.0), (DIE, 20.0)])
def test_a_hanging_or_dying_verifier_is_replaced(graded: Graded, answer: str, limit_s: float) -> None:
    async def use(grader: Grader) -> float:
        with pytest.raises(VerifierFailed):
            await grader.score(*evaluated(answer), limit_s)
        family, problem, _ = evaluated("")
        return await grader.score(family, problem, problem["answer"], 20.0)

    assert graded(use) == 1.0


def test_a_text_that_hangs_the_verifier_is_worth_zero(graded: Graded) -> None:
    async def use(grader: Grader) -> Score:
        evaluator = AnswerEvaluator(*evaluated("")[:2], grader=grader)
        return await evaluator.evaluate(Submission(answer=HANG), no_sandbox, 2.0)

    assert graded(use).value == 0.0


@pytest.mark.parametrize(
    "harm",
    [
        "__import__('os').system('touch {path}')",
        "__import__('subprocess').run(['touch', '{path}'])",
        "open('{path}', 'w').write('x')",
        "__import__('os').close(__import__('os').open('{path}', 65))",
        "__import__('os').open('{path}', 64)",
        "__import__('os').mkdir('{path}')",
        "__import__('ctypes').CDLL(None).mkdir(b'{path}', 511)",
    ],
)
def test_a_text_that_the_verifier_evaluates_does_no_harm(graded: Graded, harm: str) -> None:
    async def use(grader: Grader) -> float:
        return await grader.score(*evaluated(f"[{harm.format(path=path)}]"), 20.0)

    # Not tmp_path: whom the grader becomes when started by root could not reach that anyway.
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        path = Path(folder) / "made"
        assert graded(use) < 1.0
        assert not path.exists()


def test_concurrent_askers_get_their_own_scores(graded: Graded) -> None:
    problem = entry("chain_sum")
    answers = [problem["answer"] if index % 2 else "wrong" for index in range(20)]

    async def use(grader: Grader) -> list[float]:
        return await asyncio.gather(*[grader.score("chain_sum", problem, answer, 20.0) for answer in answers])

    assert graded(use) == [float(index % 2) for index in range(20)]


def test_a_cancelled_asker_does_not_mix_up_the_next(graded: Graded) -> None:
    problem = entry("chain_sum")

    async def use(grader: Grader) -> float:
        task = asyncio.create_task(grader.score("chain_sum", problem, "wrong", 20.0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await grader.score("chain_sum", problem, problem["answer"], 20.0)

    assert graded(use) == 1.0
