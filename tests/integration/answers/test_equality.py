"""Mathematical answers by math-verify, in a process for each: everyday pairs, and answers that try to be scored."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from farm.errors import EvaluatorError
from tests.integration.answers.conftest import no_sandbox
from workers.evaluators.answers.equality import FAMILY
from workers.evaluators.answers.equivalence import EquivalenceEvaluator, Reference
from workers.evaluators.grading import Grader
from workers.interfaces import Score, Submission

ROOT = Path(__file__).parents[3]
DATA = ROOT / "examples/data/answers/pairs_to_grade.jsonl"
PAIRS = [json.loads(line) for line in DATA.read_text().splitlines()]
MORE = [
    (r"12.5\%", "0.125"),
    (r"\{2, 3\}", "x=2, x=3"),
    ("a^2+2ab+b^2", "b^2 + a^2 + 2 a b"),
    ("a^2+2ab+b^2", "(a+b)^2"),
    (r"\frac{\pi}{2}", r"\pi/2"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
]
HACKS = [
    "",
    "?",
    "x",
    "n",
    "23, 24, 25",
    "24 or 25",
    r"24 \lor 25",
    r"24\text{ or }25",
    r"24\text{, not 25}",
    r"24 \pm 1000",
    "[0, 100]",
    r"\{1, \ldots, 100\}",
    r"\mathbb{R}",
    r"\text{any number}",
    r"\infty",
    "nan",
    "x=x",
    "0=0",
    "24!",
    r"x \neq 0",
    "__import__('os')._exit(0)",
    r"24} \boxed{25",
]


Scored = Callable[..., Score]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def grader(runner: asyncio.Runner) -> Iterator[Grader]:
    grader = Grader(FAMILY)
    yield grader
    runner.run(grader.aclose())


@pytest.fixture(scope="module")
def score(runner: asyncio.Runner, grader: Grader) -> Scored:
    def scored(gold: str, response: str, timeout_s: float = 240.0) -> Score:
        evaluator = EquivalenceEvaluator(Reference("q", gold), grader=grader)
        return runner.run(evaluator.evaluate(Submission(answer=response), no_sandbox, timeout_s))

    return scored


def test_everyday_pairs_are_graded_as_they_are_meant(score: Scored) -> None:
    wrong = [pair for pair in PAIRS if score(pair["gold"], pair["answer"]).value != float(pair["equal"])]
    assert (len(PAIRS), wrong) == (17, [])
    assert [pair for pair in MORE if score(pair[0], f"\\boxed{{{pair[1]}}}").value != 1.0] == []


def test_no_hack_is_scored(score: Scored) -> None:
    assert [hack for hack in HACKS if score("24", f"\\boxed{{{hack}}}").value] == []


def test_a_huge_number_takes_its_own_process_alone(score: Scored) -> None:
    # a second of a processor, which a busy machine may not have in its time: then it is no score
    with suppress(EvaluatorError):
        assert score("24", r"\boxed{9^{9^{9}}}", 32.0).value == 0.0
    assert score(r"\frac12", r"\boxed{0.5}").value == 1.0


def test_a_gold_answer_that_cannot_be_read_is_no_score(score: Scored) -> None:
    with pytest.raises(EvaluatorError, match="gold answer"):
        score("}{", r"\boxed{0.5}")


def test_a_grader_that_is_killed_is_no_score(runner: asyncio.Runner, grader: Grader) -> None:
    """The last test of this file, as it ends the grader."""

    async def main() -> None:
        await grader.score(FAMILY, {"gold": "1"}, "1", 240.0)
        evaluator = EquivalenceEvaluator(Reference("q", r"\frac12"), grader=grader)
        running = asyncio.ensure_future(evaluator.evaluate(Submission(answer=r"\boxed{9^{9^{9}}}"), no_sandbox, 240.0))
        await asyncio.sleep(0)
        assert grader.pid is not None
        os.kill(grader.pid, signal.SIGKILL)
        with pytest.raises(EvaluatorError, match="died"):
            await running

    runner.run(main())
