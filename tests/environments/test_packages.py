"""Each adapter runs its package: its observations, its rewards, and reproducibility with a seed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from farm.errors import HandlerError
from tests.contract.sandboxes.sandbox_kinds import farm_in
from tests.services.entry_points import installed
from tests.services.environments import lend_environment
from tests.services.farms import farm_folder
from workers.cli.environment_check import ObservedStep, first_difference, run_episodes
from workers.environments.environment import Action, Episode
from workers.environments.environment_program import EnvironmentInstance, environment_program
from workers.environments.environment_servers import EnvironmentServers
from workers.evaluators.answer import extract_answer, verified
from workers.plugins.registry import sandbox

PROJECT = Path(__file__).parent / "project"
EXAMPLES = Path(__file__).parents[2] / "examples" / "environment" / "packages"
SUM: dict[str, Any] = {
    "messages": [{"role": "user", "content": "2 + 2?"}],
    "kwargs": {"reward_spec": {"ground_truth": "4"}},
}
ACT = '{"name": "act", "arguments": {"message": "hello", "metadata": {"reward": 1000}}}'


@pytest.fixture(scope="module", autouse=True)
def _farm() -> Iterator[None]:
    with farm_folder() as folder, farm_in(folder), ExitStack() as projects:
        for project in (PROJECT, EXAMPLES):
            projects.enter_context(installed(project, folder / "site"))
        yield


def run_episode(environment: str, *actions: str, **fields: Any) -> list[ObservedStep]:
    """The first of three equal runs: the beginning, and the result of each action."""
    program = environment_program(environment)
    lend_environment(program.spec().packages, without_dependencies=program.without_dependencies)
    instance = EnvironmentInstance.model_validate({"environment": environment, **fields})
    episodes = asyncio.run(run_episodes(instance, "namespace", actions))
    assert first_difference(episodes) == ""
    return episodes[0]


def rewards(steps: list[ObservedStep]) -> list[float]:
    return [step.reward for step in steps[1:]]


def test_reasoning_gym_scores_an_answer() -> None:
    begin, _ = run_episode("reasoning_gym", "no answer", id="chain_sum", seed=7)
    numbers = begin.messages[0]["content"].split(": ")[1].split(" =")[0]
    right = f"It is <answer>{eval(numbers)}</answer>."
    assert extract_answer(right) == str(eval(numbers))
    assert rewards(run_episode("reasoning_gym", right, id="chain_sum", seed=7)) == [1.0]
    # its verifier raises for text that is not a number
    assert rewards(run_episode("reasoning_gym", "<answer>x</answer>", id="prime_factorization", seed=7)) == [0.0]


def test_gem_plays_a_game() -> None:
    guesses = [f"\\boxed{{{number}}}" for number in (5, 3, 2, 4)]
    steps = run_episode("gem", *guesses, id="game:GuessTheNumber-v0-easy", seed=3)
    assert "between 1 and 10" in steps[0].messages[0]["content"]
    assert steps[-1].over
    assert rewards(run_episode("gem", "no box", id="game:GuessTheNumber-v0-easy")) == [-0.1]


EVALUATED = {
    "a float of our own": "[setattr(__import__('builtins'),'float',lambda *a:1000.0)]",
    "memory of the parent": "[open('/proc/%d/mem' % __import__('os').getppid(), 'r+b', 0).write(b'1')]",
    "kill of the parent": "[__import__('os').kill(__import__('os').getppid(), 9)]",
    "an exit": "[__import__('os')._exit(0)]",
    "an exit of Python": "exit(0)",
    "a fault": "[__import__('ctypes').string_at(0)]",
    "a sleep": "[__import__('time').sleep(1000)]",
    "a power": "9**9**9**9",
}
OPENING = "<answer>" * 130_000


@pytest.mark.parametrize(
    ("environment", "prefix", "form"), [("reasoning_gym", "", "<answer>{}</answer>"), ("gem", "rg:", "\\boxed{{{}}}")]
)
def test_only_answers_are_scored(environment: str, prefix: str, form: str) -> None:
    """One server has all episodes, as in a worker: none of them is lost or changed by another."""
    program = environment_program(environment)
    lend_environment(program.spec().packages, without_dependencies=program.without_dependencies)

    async def main() -> None:
        servers = EnvironmentServers()

        async def reward(family: str, text: str | None) -> float:
            connection = await servers.connect(program, sandbox("namespace"))
            connection.rewards = program.rewards
            connection.verify = partial(verified, timeout_s=120.0)
            try:
                begin = await connection.reset(Episode(prefix + family, seed=7), 300.0)
                assert begin.problem is not None
                reference = begin.problem.entry["answer"]
                return (await connection.step(Action(form.format(reference) if text is None else text), 120.0)).reward
            finally:
                connection.drop()

        try:
            for family in ("string_insertion", "gcd", "game_of_life_halting", "spiral_matrix"):
                assert await reward(family, None) == 1.0, family
            for name, text in EVALUATED.items():
                assert await reward("string_insertion", form.format(text)) == 0.0, name
            for text in ("anything", OPENING, form.format("anything"), form.format(OPENING)):
                assert await reward("game_of_life_halting", text) == 0.0, text[:100]
            assert await reward("lcm", form.format("rubbish")) == 0.0
            assert await reward("lcm", None) == 1.0
            assert len(servers._servers) == 1
        finally:
            await servers.aclose()

    asyncio.run(main())


def test_environment_that_downloads_data_reports_it() -> None:
    with pytest.raises(HandlerError, match=r"environment gem: reset\(\)"):
        run_episode("gem", "1", id="math:GSM8K")


def test_skyrl_gym_scores_an_answer() -> None:
    assert rewards(run_episode("skyrl_gym", "#### 4", id="gsm8k", **SUM)) == [1.0]
    turns = run_episode(
        "skyrl_gym",
        "I do not know.",
        "#### 4",
        id="gsm8k_multi_turn",
        **(SUM | {"kwargs": SUM["kwargs"] | {"max_turns": 3}}),
    )
    assert rewards(turns) == [0.0, 1.0]
    with pytest.raises(HandlerError, match="use the environment skyrl_gym_code"):
        run_episode("skyrl_gym", "x", id="lcb", **SUM)


def test_textarena_gives_its_reward_at_the_end() -> None:
    guesses = [f"[{number}]" for number in range(1, 12)]
    steps = run_episode("textarena", *guesses, id="GuessTheNumber-v0", seed=3)
    assert "between 1 and 20" in steps[0].messages[0]["content"]
    assert "higher" in steps[1].messages[0]["content"]
    assert "Player 0" not in steps[1].messages[0]["content"], "only new messages"
    assert [reward for reward in rewards(steps) if reward] == rewards(steps)[-1:]


def test_openenv_acts_by_a_tool() -> None:
    begin, replied, acted, wrong = run_episode("openenv_echo", "hi", ACT, '{"name": "act", "arguments": {"text": 1}}')
    assert "environment ready" in begin.messages[0]["content"]
    assert begin.messages[1]["function"]["name"] == "act"
    assert [replied.reward, acted.reward, wrong.reward] == pytest.approx([0.2, 0.5, 0.0])
    assert "reward" not in acted.messages[0]["content"]
    assert "This is no action" in wrong.messages[0]["content"]


def test_verifiers_scores_by_its_rewards() -> None:
    fields = {"kwargs": {"taskset": "verifiers_sums:Sums", "index": 2}, "rewards": (0, 1.5)}
    begin, step = run_episode("verifiers_sums", "It is 4.", **fields)
    assert begin.messages == [{"role": "user", "content": "What is 2 + 2?"}]
    assert step.reward == 1.5
    assert rewards(run_episode("verifiers_sums", "It is certainly five.", **fields)) == [0.0]
