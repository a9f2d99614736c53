"""Right turns in unusual forms get the full reward, graded by the environment itself or verified by the node.

`make test` runs every fourth, `make soak` all of them.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.environments.conftest import EnvironmentRun
from tests.integration.environments.honest_turns import PROBLEMS, TEXTS
from tests.integration.environments.test_verified_answers import reward
from tests.services.soak import at_length
from workers.testing.fakes import answering

pytestmark = pytest.mark.soak
ANSWERS = {f"{name} {number}": (name, each) for name in PROBLEMS for number, each in enumerate(PROBLEMS[name][1])}
CHOSEN_TEXTS = at_length([*TEXTS][::4], [*TEXTS])
CHOSEN_ANSWERS = at_length([*ANSWERS][::4], [*ANSWERS])
N_HONEST = 40


@pytest.mark.parametrize("name", CHOSEN_TEXTS)
def test_right_text_gets_the_full_reward(loop: asyncio.Runner, name: str) -> None:
    run = EnvironmentRun("guessing_game", *map(answering, TEXTS[name]), kwargs={"most": 1})
    assert loop.run(run.score()) == 1.0
    assert run.submission.rewards == (*[0.0] * (len(TEXTS[name]) - 1), 1.0)


@pytest.mark.parametrize("name", CHOSEN_ANSWERS)
def test_right_answer_gets_the_full_reward(loop: asyncio.Runner, name: str) -> None:
    problem, answer = ANSWERS[name]
    assert reward(loop, PROBLEMS[problem][0], answer) == 1.0


def test_there_are_enough_honest_cases() -> None:
    assert len(TEXTS) + len(ANSWERS) >= N_HONEST
