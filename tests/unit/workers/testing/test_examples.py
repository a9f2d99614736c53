from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from examples.problems import FAMILIES, humaneval_problems, math_problems, swe_problems
from examples.scripts import example_script, write_script
from farm.records.request import Instance
from workers.handlers.code import CodeHandler
from workers.handlers.math import MathHandler
from workers.handlers.swe import SweHandler
from workers.plugins.handler import Handler
from workers.plugins.interfaces import Sandbox
from workers.testing.scripted_model import Script

HANDLERS: dict[str, type[Handler[Any]]] = {"math": MathHandler, "code": CodeHandler, "swe": SweHandler}
PROBLEMS: dict[str, Callable[[], list[Instance]]] = {
    "math": math_problems,
    "code": humaneval_problems,
    "swe": swe_problems,
}


def no_sandbox(*_: object, **__: object) -> AbstractAsyncContextManager[Sandbox]:
    raise AssertionError("answers are scored without a sandbox")


@pytest.mark.parametrize(("source", "n"), [("math", 4 * len(FAMILIES)), ("code", 164), ("swe", 7)])
def test_instances_validate_and_are_in_the_script(source: str, n: int, tmp_path: Path) -> None:
    instances = PROBLEMS[source]()
    problems = example_script(instances)
    script = Script.read(write_script(problems, tmp_path / "book.jsonl"))
    assert len(instances) == n
    for instance, problem in zip(instances, problems, strict=True):
        handler = HANDLERS[source]
        messages = handler(handler.instance_type.model_validate(instance.fields)).messages()
        firsts = [branch.turns[0] for branch in problem.branches]
        assert all(script.next_turn(messages, seed) in firsts for seed in range(10))


def test_problems_are_reproducible() -> None:
    assert math_problems(seed=3) == math_problems(seed=3)
    assert math_problems(seed=3) != math_problems(seed=4)


def test_swe_problems_by_number_and_name() -> None:
    assert len(swe_problems(2)) == 2
    name = "click-8.2.1-nested-completion"
    assert [instance.instance_id for instance in swe_problems([name])] == [name]


def test_programs_of_math_rollouts_print_the_answer() -> None:
    for instance, problem in zip(math_problems(), example_script(math_problems()), strict=True):
        arguments: Any = problem.branches[0].turns[0].tool_calls[0].arguments
        printed: list[object] = []
        exec(arguments["code"], {"print": printed.append})
        assert [str(result) for result in printed] == [instance.fields["answer"]]


def test_rewards_differ_within_most_groups_of_four() -> None:
    instances = [*math_problems(), *humaneval_problems(40), *swe_problems()]
    script = Script(example_script(instances))
    n_mixed = 0
    for instance, problem in zip(instances, example_script(instances), strict=True):
        handler = HANDLERS[instance.data_source]
        messages = handler(handler.instance_type.model_validate(instance.fields)).messages()
        # Rollouts with equal beginnings cannot be distinguished by their first turn, so the draw itself is checked.
        drawn = {script.next_branch(messages, seed) for seed in range(4)}
        right = {"reference" in name for name in drawn}
        n_mixed += len(right) == 2
        assert {branch.name for branch in problem.branches} >= drawn
    assert n_mixed > 0.6 * len(instances)
