"""The scripts of the mathematical example problems score as their names say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from examples.problems import math_problems
from examples.scripts import example_script
from workers.evaluators.answer import extract_answer
from workers.plugins.interfaces import Score
from workers.testing.scripted_model import Branch


def answer(branch: Branch) -> str:
    """Return the text that a mathematics script submits or says at its end."""
    last = branch.turns[-1]
    if not last.tool_calls:
        return extract_answer(last.content)
    arguments: Any = last.tool_calls[0].arguments
    return str(arguments["answer"])


def test_example_scripts_score_as_their_names_state(score: Callable[..., Score]) -> None:
    instances = math_problems(per_family=2)
    for instance, problem in zip(instances, example_script(instances), strict=True):
        for branch in problem.branches:
            scored = score(instance.fields["family"], answer(branch), instance.fields)
            assert (scored.value == 1.0) == branch.name.startswith("reference"), (instance.instance_id, branch.name)
