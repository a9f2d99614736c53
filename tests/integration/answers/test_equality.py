"""Mathematical answers with math-verify, in a process for each: everyday pairs, and answers that try to cheat."""

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
from workers.evaluators.answers.equivalence import EquivalenceEvaluator
from workers.evaluators.answers.reference import Reference
from workers.evaluators.grading import Grader
from workers.plugins.interfaces import Score, Submission

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
RIGHT = [
    *(("(1, 2)", "(1.0, 2)"), (r"\{1, 2\}", "2, 1"), ("x=3", "3"), (r"(\frac{1}{3}, 2)", "(0.333333, 2)")),
    *((r"\{10^{-9}, 1\}", r"\{1, 10^{-9}\}"), (r"(-\infty, 2]", r"(-\infty, 2]"), ("x=y", "y=x")),
    *((r"6.63\times10^{-34}", r"6.63 \times 10^{-34}"), (r"6.63\times10^{-34}", "6.63e-34"), ("0.333333", r"\frac13")),
    *(
        ("5 kg", "5 kg"),
        ("5 kg", "5 kilograms"),
        ("5 m/s", r"5\text{ m/s}"),
        ("5 m/s", r"5 m\cdot s^{-1}"),
        ("5", "5 m"),
    ),
    *(
        ("5 m/s", "5 meters per second"),
        ("10 s", "10 seconds"),
        ("5 m/s", "5 ms^{-1}"),
        ("7 m^2", "7 m²"),
        ("3", "3 apples"),
    ),
    *(("London", "london"), ("no", "No"), ("Yes", "YES"), ("5 apples", "5 Apples"), ("the Nile", "The nile.")),
    *(("24", "x=24"), ("24", "12+12=24"), ("24", r"2x=48 \implies x=24"), ("24", "24 = 24.0"), ("24", "f(3) = 24")),
    *((r"2^{10}", "1024"), ("x^2", "x²"), ("10^{-3}", "10⁻³"), ("2x+X", "X + 2x")),
    *(
        ("5 N", "5 newtons"),
        (r"5 N\cdot m", "5 N·m"),
        ("5 µm", "5 micrometers"),
        ("24", "x = 24, x = 24"),
        ("0", "0.0"),
        ("300 K", "300 K"),
        ("24", r"24\text{ cm}"),
        ("1e-9", r"10^{-9}"),
    ),
]
WRONG = [
    *(("(1e-9, 2)", "(2e-9, 2)"), (r"\{10^{-9}, 1\}", r"\{10^{-8}, 1\}"), ("x=10^{-9}", "x=10^{-8}")),
    *(("5", r"5\sqrt{2}"), ("5", r"5\sqrt2"), ("5", r"5\log{3}"), ("5", "5sin2"), ("5", r"5\pi"), ("5", r"5\infty")),
    *(
        (r"6.63\times10^{-34}", "10^{-30}"),
        (r"6.63\times10^{-34}", r"6.4\times10^{-34}"),
        ("1e-9", "2e-9"),
        ("0", "1e-9"),
    ),
    *((r"\frac{1}{10^9}", r"\frac{1}{10^8}"), ("0", r"\frac{1}{10^{8}}"), ("2e-8", "1/10^8")),
    *(("5 kg", "5 g"), ("20 m", "20 cm"), ("10 s", "10 h"), ("5 kg", "5 grams"), ("5 m/s", "5 m"), ("5 m/s", "5 km/h")),
    *(("5 m/s", "5 m s"), ("7 m^2", "7 m^3"), ("7 m²", "7 m³"), ("3 J", "3 kJ"), ("3 N", "3 newton meters")),
    *(("5 mW", "5 MW"), ("5 mPa", "5 MPa"), ("M", "m"), ("2x+X", "2X+x"), (r"\Delta", r"\delta"), ("AB", "Ab")),
    *(("23", "2³"), ("210", "2¹⁰"), ("10", "1⁰"), ("12", "1²"), ("105", "10⁵")),
    *(("24", "24k"), ("24", "24 or7"), ("24", "24 thousand"), ("24", "24 hundredths"), ("24", "24 dozen")),
    *(("no", "on"), ("yes", "sey"), ("ten", "net")),
    *(("24", "25=24"), ("24", r"25 \\ 24"), ("24", r"25 \to 24"), ("24", r"25 \implies 24"), ("24", "25, i.e. 24")),
    *(("24", r"x=25 \lor x=24"), ("24", r"25 \iff 24"), ("24", "25; 24"), ("24", "x = 25 = 24"), ("24", "25 hence 24")),
    *(("24", r"25 \Rightarrow 24"), ("24", r"25 \rightarrow 24"), ("24", "25 ⇒ 24"), ("24", "25, so 24")),
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
    def scored(gold: str, response: str, timeout_s: float = 240.0, evaluated: bool | None = None) -> Score:
        evaluator = EquivalenceEvaluator(Reference("q", gold, evaluated=evaluated), grader=grader)
        return runner.run(evaluator.evaluate(Submission(answer=response), no_sandbox, timeout_s))

    return scored


def test_common_pairs_are_graded_correctly(score: Scored) -> None:
    wrong = [pair for pair in PAIRS if score(pair["gold"], pair["answer"]).value != float(pair["equal"])]
    assert (len(PAIRS), wrong) == (17, [])
    assert [pair for pair in MORE if score(pair[0], f"\\boxed{{{pair[1]}}}").value != 1.0] == []


def test_equivalent_notation_is_right(score: Scored) -> None:
    assert [pair for pair in RIGHT if score(pair[0], f"\\boxed{{{pair[1]}}}").value != 1.0] == []


def test_different_value_is_wrong(score: Scored) -> None:
    assert [pair for pair in WRONG if score(pair[0], f"\\boxed{{{pair[1]}}}").value] == []


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("24", "12+12"),
        ("24", r"\sqrt{576}"),
        ("24", "4!"),
        ("24", r"\frac{48}{2}"),
        ("1024", "2¹⁰"),
        ("0.5", r"1-\frac12"),
    ],
)
def test_unevaluated_operation_is_wrong_if_the_value_is_required(score: Scored, gold: str, answer: str) -> None:
    boxed = f"\\boxed{{{answer}}}"
    found = score(gold, boxed)
    assert (found.value, found.details["rule"]) == (0.0, "not evaluated")
    assert score(gold, boxed, evaluated=False).value == 1.0
    assert score(answer, boxed, evaluated=True).value == 1.0


def test_hacks_score_zero(score: Scored) -> None:
    assert [hack for hack in HACKS if score("24", f"\\boxed{{{hack}}}").value] == []


def test_huge_number_affects_only_its_own_process(score: Scored) -> None:
    # a second of CPU, which it may not get in its time on a busy machine: then there is no score
    with suppress(EvaluatorError):
        assert score("24", r"\boxed{9^{9^{9}}}", 32.0).value == 0.0
    assert score(r"\frac12", r"\boxed{0.5}").value == 1.0


def test_unreadable_gold_answer_is_an_error(score: Scored) -> None:
    with pytest.raises(EvaluatorError, match="gold answer"):
        score("}{", r"\boxed{0.5}")


def test_killed_grader_gives_an_error(runner: asyncio.Runner, grader: Grader) -> None:
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
