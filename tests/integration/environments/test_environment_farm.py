"""A whole farm plays environments: rewards of turns with their turns, and a simulated user that never trains."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import farm
from farm.adapters.arrays import arrays
from farm.cli.console import console
from farm.cli.display import transcript
from farm.client.local import LocalFarm
from tests.conftest import absent
from tests.doubles import EngineDouble
from tests.services.entry_points import install
from tests.services.farms import embedded, farm_folder, until
from workers.sandboxes.namespace import NamespaceProvider
from workers.testing.scripted_model import Branch, Script, ScriptedCall, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

ROOT = Path(__file__).parents[3]
HALVING = [ScriptedTurn(content=f"<guess>{guess}</guess>") for guess in (5, 2, 3, 4)]
CLERK = (
    ScriptedTurn(content="Which order is it?"),
    ScriptedTurn(content="", tool_calls=(ScriptedCall(name="cancel_order", arguments={"number": 0}),)),
    ScriptedTurn(content="There is no such order. I am sorry."),
)
POLICY = Script(
    [
        ScriptedProblem(match="I think of a number", plays=(Branch(name="halving", turns=tuple(HALVING)),)),
        ScriptedProblem(match="Please cancel my order.", plays=(Branch(name="clerk", turns=CLERK),)),
    ]
)
CUSTOMER = Script(
    [
        ScriptedProblem(
            match="Hello, how can I help?",
            plays=(
                Branch(
                    name="customer",
                    turns=tuple(
                        ScriptedTurn(content=said)
                        for said in ("Please cancel my order.", "The one of today.", "Well. ###STOP###")
                    ),
                ),
            ),
        )
    ]
)


@pytest.fixture(scope="module")
def client() -> Iterator[tuple[LocalFarm, str]]:
    """A farm with the example's environments, and the address of the customer's model."""
    if missing := NamespaceProvider().missing():
        absent(missing)
    with farm_folder() as folder, pytest.MonkeyPatch.context() as patch:
        install(ROOT / "examples" / "environment", folder / "site")
        patch.syspath_prepend(str(folder / "site"))
        patch.setenv("PYTHONPATH", str(folder / "site"))
        with (
            serving(EngineDouble(POLICY).app()) as policy,
            serving(EngineDouble(CUSTOMER).app()) as customer,
            embedded(folder, FARM_POLICY_URL=f"{policy}/v1", PYTHONPATH=str(folder / "site")) as here,
            farm.connect(here.store_url, broker_url=here.broker_url) as connected,
        ):
            assert isinstance(connected, LocalFarm)
            until(lambda: connected.engines()[0].engine.info is not None, "the engine was asked what it can do")
            yield connected, f"{customer}/v1"


def test_rewards_of_turns_are_kept_with_their_turns_and_tokens(client: tuple[LocalFarm, str]) -> None:
    connected, _ = client
    fields = {"environment": "guessing_game", "seed": 3}
    batch_id = connected.submit({"instances": [{"data_source": "environment", "fields": fields}], "n_samples": 3})
    rollouts = connected.collect(batch_id)
    assert [each.failure for each in rollouts] == [None] * 3
    assert len({each.reward for each in rollouts}) == 1
    rollout = rollouts[0]
    calls = connected.calls(rollout.rollout_id)
    of_turns = [call.reward for call in calls]
    assert rollout.reward == pytest.approx(sum(each or 0.0 for each in of_turns))
    assert len([each for each in of_turns if each]) > 1
    (segment,) = rollout.segments
    assert [reward for _, reward in segment.turn_rewards] == of_turns
    assert all(segment.response_mask[place] == 1 for place, _ in segment.turn_rewards)
    # what the environment said is in the row, and not trained on
    assert 0 < segment.response_mask.sum() < len(segment.response_mask)
    rows = arrays(rollouts)
    assert rows.turn_rewards.sum(axis=1) == pytest.approx(rows.rewards, abs=1e-5)
    assert np.all(rows.turn_rewards[rows.response_mask == 0] == 0)


def test_a_simulated_user_is_recorded_and_never_trains(client: tuple[LocalFarm, str]) -> None:
    connected, customer = client
    request = {
        "instances": [{"data_source": "environment", "fields": {"environment": "shop", "seed": 1}}],
        "roles": {"user": {"engine_url": customer}},
    }
    (rollout,) = connected.collect(connected.submit(request))
    assert (rollout.failure, rollout.outcome, rollout.reward) == (None, "submitted", 0.0)
    calls = connected.calls(rollout.rollout_id)
    first, *_ = calls
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert first.messages[1]["content"] == "Please cancel my order."
    assert first.observations == [{"role": "user", "content": "The one of today."}]
    assert calls[1].observations[0]["content"] == "There is no open order 0."
    (segment,) = rollout.segments
    assert int(segment.response_mask.sum()) == sum(call.n_response_tokens for call in calls)
    (kept,) = [each for each in connected.artefacts(rollout.rollout_id) if "role-calls" in each.name]
    lines = connected.artefact(rollout.rollout_id, kept.name).splitlines()
    assert [json.loads(line)["reply"] for line in lines] == [
        "Please cancel my order.",
        "The one of today.",
        "Well. ###STOP###",
    ]


def test_a_batch_that_names_no_user_is_refused(client: tuple[LocalFarm, str]) -> None:
    connected, _ = client
    with pytest.raises(farm.InvalidRequest, match="'user'"):
        connected.submit({"instances": [{"data_source": "environment", "fields": {"environment": "shop"}}]})


def test_show_prints_the_reward_of_each_turn(client: tuple[LocalFarm, str]) -> None:
    connected, _ = client
    rollout = connected.collect(connected.recent(9)[-1])[0]
    with console.capture() as capture:
        console.print(transcript(rollout, connected.calls(rollout.rollout_id), (), ()))
    assert "call 0 · reward 0.1 ·" in capture.get()
    assert "reward 1 ·" in capture.get()


def test_a_check_says_which_environment_is_not_deterministic(client: tuple[LocalFarm, str]) -> None:
    command = [sys.executable, "-m", "workers.cli.environment_check", "check", "guessing_game", "--seed", "3"]
    done = subprocess.run([*command, "--action", "<guess>5</guess>"], capture_output=True, text=True)
    assert "guessing_game: deterministic over 1 steps" in done.stdout, done.stderr


def test_a_check_takes_the_range_of_rewards(client: tuple[LocalFarm, str]) -> None:
    command = [sys.executable, "-m", "workers.cli.environment_check", "check", "guessing_game", "--seed", "3"]
    command += ["--action", "<guess>5</guess>", "--rewards", "0", "0.01"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "as the reward, outside of 0 to 0.01" in done.stderr
