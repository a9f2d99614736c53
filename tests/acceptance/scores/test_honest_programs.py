"""Right programs in unusual forms score 1 with all their evaluators, and values that only look right 0."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Iterator, Mapping

import pytest

from tests.acceptance.scores.honest_programs import READS, SORTS, WRITING, WRONG_VALUES
from tests.acceptance.scores.test_hidden_tests import fresh, runner, scored
from workers.evaluators.program_tests.evaluator import ProgramTestsEvaluator
from workers.evaluators.program_tests.form_rules import CallTest, HiddenTests, StreamTest
from workers.evaluators.programs import ProgramEvaluator
from workers.plugins.interfaces import FreshSandbox

__all__ = ["fresh", "runner"]

LISTS: tuple[list[int], ...] = ([3, 1, 2], [], [2, 2, 1], [*range(50, 0, -1), -7])
CHECK = "def check(candidate):\n" + "".join(f"    assert candidate({x}) == {sorted(x)}\n" for x in LISTS)
CALLS = HiddenTests(tuple(CallTest((x,), (sorted(x),)) for x in LISTS), function="f")
STREAMS = HiddenTests(
    tuple(StreamTest(" ".join(map(str, x)) + "\n", " ".join(map(str, sorted(x))) + "\n") for x in LISTS if x)
)
CODE = ProgramEvaluator("", CHECK, "f")


def values(
    runner: asyncio.Runner, evaluator: object, fresh: FreshSandbox, programs: Mapping[str, str]
) -> Iterator[tuple[str, float, object]]:
    for name, program in programs.items():
        score = runner.run(scored(evaluator, fresh, textwrap.dedent(program), 100.0))
        yield name, score.value, score.details.get("reason")


@pytest.mark.parametrize("evaluator", [CODE, ProgramTestsEvaluator(CALLS)], ids=["checks", "calls"])
def test_right_functions_score_one(
    runner: asyncio.Runner, fresh: FreshSandbox, evaluator: ProgramEvaluator | ProgramTestsEvaluator
) -> None:
    programs = SORTS if evaluator is CODE else {**SORTS, **WRITING}
    assert len(programs) >= 40
    assert [each for each in values(runner, evaluator, fresh, programs) if each[1] != 1.0] == []


def test_right_programs_score_one(runner: asyncio.Runner, fresh: FreshSandbox) -> None:
    ending = "\nprint(*f(list(map(int, input().split()))))\n"
    whole = {f"f-{name}": textwrap.dedent(SORTS[name]) + ending for name in SORTS if name != "prints"}
    programs = {**READS, **{name: whole[name] for name in [*whole][::2]}}
    assert len(programs) >= 40
    assert [each for each in values(runner, ProgramTestsEvaluator(STREAMS), fresh, programs) if each[1] != 1.0] == []


@pytest.mark.parametrize("evaluator", [CODE, ProgramTestsEvaluator(CALLS)], ids=["checks", "calls"])
def test_values_other_than_the_list_score_zero(
    runner: asyncio.Runner, fresh: FreshSandbox, evaluator: ProgramEvaluator | ProgramTestsEvaluator
) -> None:
    assert [each for each in values(runner, evaluator, fresh, WRONG_VALUES) if each[1] != 0.0] == []


@pytest.mark.parametrize(("depth", "value"), [(150, 1.0), (180, 1.0)])
def test_deeply_nested_values_are_compared(
    runner: asyncio.Runner, fresh: FreshSandbox, depth: int, value: float
) -> None:
    expected: list[object] = []
    for _ in range(depth):
        expected = [expected]
    program = f"def f(n):\n    x = []\n    for _ in range({depth}): x = [x]\n    return x\n"
    evaluator = ProgramTestsEvaluator(HiddenTests((CallTest((1,), (expected,)),), function="f"))
    assert runner.run(scored(evaluator, fresh, program)).value == value
