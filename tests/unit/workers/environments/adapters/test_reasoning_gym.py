"""The adapter of reasoning-gym: it returns a problem and an answer, and never a reward."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from workers.environments.adapters.reasoning_gym import ReasoningGym
from workers.environments.environment import Action, Episode


def unasked(role: str, messages: object) -> str:
    raise AssertionError("it asks no LLM")


@pytest.mark.parametrize("family", ["string_insertion", "countdown", "gcd"])
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is <answer> [1/0] </answer>.", "[1/0]"),
        ("<answer>a</answer> or <answer>b</answer>", "b"),
        ("no tags", None),
        ("<answer>" * 130_000, None),
    ],
)
def test_step_returns_the_answer_and_no_reward(family: str, text: str, answer: str | None) -> None:
    environment = ReasoningGym(unasked)
    begin = environment.reset(Episode(family, seed=7))
    assert begin.problem is not None
    assert (begin.problem.family, begin.problem.settings) == (family, {})
    step = environment.step(Action(text))
    assert (step.answer, step.reward, step.terminated) == (answer, 0.0, True)
    reference = environment.step(Action(environment.reference() or ""))
    assert reference.answer == str(begin.problem.entry["answer"]).strip()


def test_settings_of_the_dataset_are_in_the_problem() -> None:
    begin = ReasoningGym(unasked).reset(Episode("decimal_arithmetic", {"max_num_decimal_places": 4}, seed=7))
    assert begin.problem is not None
    assert begin.problem.settings == {"max_num_decimal_places": 4, "seed": 7, "size": 1}


def test_entries_are_of_the_release_that_verifies_answers() -> None:
    assert f"reasoning-gym=={version('reasoning-gym')}" in ReasoningGym.packages
