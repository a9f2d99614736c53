"""The scripts of the mathematical example problems score as their names say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from examples.plays import example_script
from examples.problems import math_problems
from workers.evaluators.answer import extract_answer
from workers.plugins.interfaces import Score
from workers.testing.scripted_model import Branch


def answer(play: Branch) -> str:
    """Return the text that a mathematics script submits or says at its end."""
    last = play.turns[-1]
    if not last.tool_calls:
        return extract_answer(last.content)
    arguments: Any = last.tool_calls[0].arguments
    return str(arguments["answer"])


def test_mathematics_plays_are_right_and_wrong_as_named(score: Callable[..., Score]) -> None:
    instances = math_problems(per_family=2)
    for instance, problem in zip(instances, example_script(instances), strict=True):
        for play in problem.plays:
            scored = score(instance.fields["family"], answer(play), instance.fields)
            assert (scored.value == 1.0) == play.name.startswith("reference"), (instance.instance_id, play.name)
