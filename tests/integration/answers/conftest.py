"""A grader that the tests of a run share, as its process takes seconds to start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import cache
from typing import Any, TypeAlias

import pytest

from workers.evaluators.answer import AnswerEvaluator
from workers.evaluators.grading import Grader
from workers.plugins.interfaces import Sandbox, Score, Submission

Graded: TypeAlias = Callable[[Callable[[Grader], Awaitable[Any]]], Any]


def no_sandbox(*_: object, **__: object) -> AbstractAsyncContextManager[Sandbox]:
    raise AssertionError("answers are scored without a sandbox")


@cache
def entry(family: str) -> dict[str, Any]:
    # loaded once, not by each process of the tests, as it takes seconds
    import reasoning_gym

    made: dict[str, Any] = reasoning_gym.create_dataset(family, size=1, seed=3)[0]
    return made


@pytest.fixture(scope="session")
def graded() -> Iterator[Graded]:
    """Yield a function that runs code with the shared grader."""
    with asyncio.Runner() as runner:
        grader = Grader()

        async def use_it(use: Callable[[Grader], Awaitable[Any]]) -> Any:
            return await use(grader)

        yield lambda use: runner.run(use_it(use))
        runner.run(grader.aclose())


@pytest.fixture(scope="session")
def score(graded: Graded) -> Callable[..., Score]:
    def scored(family: str, answer: str | None, problem: dict[str, Any] | None = None) -> Score:
        async def use(grader: Grader) -> Score:
            evaluator = AnswerEvaluator(family, problem or entry(family), grader=grader)
            return await evaluator.evaluate(Submission(answer=answer), no_sandbox, 30.0)

        result: Score = graded(use)
        return result

    return scored
