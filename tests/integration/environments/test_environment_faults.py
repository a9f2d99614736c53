"""Any fault of an environment is a failed attempt, never a reward; and it affects nothing else."""

from __future__ import annotations

import asyncio

import pytest

from farm.errors import EvaluatorError, HandlerError
from farm.records.rollout import Outcome
from tests.integration.environments.conftest import EnvironmentRun
from workers.testing.fakes import answering, calling

FAULTS = {
    "reset:raise": r"reset\(\) broke: ValueError: this is wrong",
    "step:raise": r"step\(\) broke: ValueError: this is wrong",
    "close:raise": r"close\(\) broke: ValueError: this is wrong",
    "step:rude": r"step\(\) broke: _Rude",
    "step:exit": r"step\(\) broke: SystemExit",
    "step:_exit": r"ended with code 3 in step\(\)",
    "reset:segfault": r"ended by signal 11 in reset\(\)",
    "step:kill": r"ended by signal 9 in step\(\)",
    "step:segfault": r"ended by signal 11 in step\(\)",
    "step:hang": r"step\(\) took longer than",
    "close:hang": r"close\(\) took longer than",
    "step:memory": r"step\(\) broke: MemoryError",
    "step:rubbish": r"step\(\) sent a line that is not JSON",
    "step:bytes": r"step\(\) sent a line that is not JSON",
    "step:half": r"step\(\) sent a line that is not JSON",
    "step:list": r"step\(\) sent an invalid reply",
    "step:empty": r"step\(\) broke: no reply",
    "step:no_step": r"step\(\) returned no Step",
    "step:nan": r"step\(\) gave nan as the reward",
    "step:infinite": r"step\(\) gave inf as the reward",
    "step:true": r"step\(\) gave True as the reward",
    "step:text": r"step\(\) gave 1 as the reward",
    "step:huge": r"step\(\) gave 10+ as the reward",
    "step:web": r"needs data from the web, which its sandbox cannot reach",
    "step:ask": r"asks the role 'user', which is not among its `roles`",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_environment_fails_the_attempt_without_a_reward(loop: asyncio.Runner, fault: str) -> None:
    # a hanging one times out after a second, which is long for the others
    tool_s = 1.0 if fault.endswith("hang") else 60.0
    script = [answering("win")] if fault.startswith("close") else [answering("a"), answering("b"), answering("c")]
    run = EnvironmentRun("unruly", *script, kwargs={"fault": fault}, limits={"tool_s": tool_s})
    with pytest.raises(HandlerError, match=f"b.0.0: environment unruly: .*{FAULTS[fault]}|{FAULTS[fault]}"):
        loop.run(run.score())


def test_rollout_starts_with_a_fresh_environment_state(loop: asyncio.Runner) -> None:
    runs = [EnvironmentRun("unruly", answering("win"), seed=7) for _ in range(3)]
    for run in runs:
        assert loop.run(run.score()) == 1.0
    begun = [run.policy.requests[0][0][0]["content"] for run in runs]
    assert len(set(begun)) == 1
    assert begun[0].startswith("1 None 0.")


def test_concurrent_rollouts_are_independent(loop: asyncio.Runner) -> None:
    runs = [EnvironmentRun("unruly", *[answering(f"{n} {k}") for k in range(3)], seed=n % 4) for n in range(24)]
    broken = EnvironmentRun("unruly", answering("a"), kwargs={"fault": "step:kill"})

    async def all_of_them() -> list[float | BaseException]:
        return await asyncio.gather(*(each.score() for each in (*runs, broken)), return_exceptions=True)

    *rewards, failed = loop.run(all_of_them())
    assert rewards == [0.75] * 24
    assert isinstance(failed, HandlerError)
    for n, run in enumerate(runs):
        assert run.observed == [repr([f"{n} {k}", []]) for k in range(3)]


def test_environment_that_does_not_start_reports_why_and_is_retried(loop: asyncio.Runner) -> None:
    for _ in range(2):
        with pytest.raises(HandlerError, match=r"its server did not start: .*a_module_that_is_not_there"):
            loop.run(EnvironmentRun("absent", answering("a")).score())


@pytest.mark.parametrize(
    ("limits", "kwargs", "outcome", "reward"),
    [
        ({"max_turns": 2}, {"n": 5, "last": 1.0}, Outcome.MAX_TURNS, 1.5),
        ({"max_tokens": 20}, {"n": 5, "last": 1.0}, Outcome.MAX_TOKENS, 1.5),
        ({}, {"n": 3, "truncates": True, "last": -1.0}, Outcome.MAX_TURNS, -0.25),
        ({}, {"n": 3}, Outcome.SUBMITTED, 0.75),
    ],
)
def test_limit_is_an_outcome_and_earlier_rewards_count(
    loop: asyncio.Runner, limits: dict[str, int], kwargs: dict[str, object], outcome: Outcome, reward: float
) -> None:
    run = EnvironmentRun("unruly", *[answering("a")] * 3, kwargs=kwargs, limits=limits)
    assert loop.run(run.score()) == pytest.approx(reward)
    assert run.outcome is outcome
    turns = [call.reward for call in run.calls.values()]
    assert sum(each or 0.0 for each in turns) == pytest.approx(reward)
    assert run.details["rewards"] == turns


@pytest.mark.parametrize(("most", "outcome"), [(27, Outcome.MAX_TOKENS), (100, Outcome.CONTEXT_FULL)])
def test_truncated_action_is_run_and_its_limit_is_the_outcome(
    loop: asyncio.Runner, most: int, outcome: Outcome
) -> None:
    cut = answering("a", finish_reason="length", n_tokens=7)
    script = [answering("a", n_tokens=10), answering("a", n_tokens=10), cut]
    run = EnvironmentRun("unruly", *script, kwargs={"n": 3}, limits={"max_tokens": most})
    assert loop.run(run.score()) == pytest.approx(0.75)
    assert run.outcome is outcome


def test_rollout_of_another_agent_cannot_be_scored(loop: asyncio.Runner) -> None:
    """An answer that looks like rewards is a text."""
    with pytest.raises(EvaluatorError, match="an agent other than `environment` ran the rollout"):
        loop.run(EnvironmentRun("unruly", answering('{"rewards": [1.0]}'), agent="react").score())


def test_environment_that_is_not_shared_has_a_sandbox_per_rollout(loop: asyncio.Runner) -> None:
    with pytest.raises(HandlerError):
        loop.run(EnvironmentRun("lonely", answering("a"), kwargs={"fault": "step:kill_all"}).score())
    assert loop.run(EnvironmentRun("lonely", answering("win")).score()) == 1.0


def test_tool_calls_reach_the_environment_and_invalid_ones_do_not(loop: asyncio.Runner) -> None:
    script = [calling(("look", {"at": 1}), ("bash", {"command": "ls"})), calling(("look", "[1]")), answering("win")]
    run = EnvironmentRun("unruly", *script)
    assert loop.run(run.score()) == 1.25
    assert [call.n_invalid for call in run.calls.values()] == [1, 1, 0]
    assert [call.reward for call in run.calls.values()] == [0.25, None, 1.0]
    assert run.observed[0].startswith("There is no tool 'bash'")
    assert run.observed[1] == repr(["", [["look", {"at": 1}]]])
    assert "must be one JSON object" in run.observed[2]
