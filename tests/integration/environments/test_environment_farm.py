"""A whole farm runs environments: rewards of turns are with their turns, and a simulated user never trains."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import farm
from farm.adapters.arrays import arrays
from farm.cli.console import console
from farm.cli.display import transcript
from farm.client.local import LocalFarm
from farm.records.trajectory import tools_by_call
from tests.conftest import absent
from tests.doubles import EngineDouble
from tests.services.api import served, shown_key
from tests.services.entry_points import installed
from tests.services.farms import embedded, farm_folder, until
from tests.services.preloaded import completed
from workers.sandboxes.namespace import NamespaceProvider
from workers.testing.engine.simulated_values import ExpertRouting
from workers.testing.scripted_model import Branch, Script, ScriptedCall, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

ROOT = Path(__file__).parents[3]
HALVING = [ScriptedTurn(content=f"<guess>{guess}</guess>") for guess in (5, 2, 3, 4)]
CLERK = (
    ScriptedTurn(content="Which order is it?"),
    ScriptedTurn(content="", tool_calls=(ScriptedCall(name="cancel_order", arguments={"number": 0}),)),
    ScriptedTurn(content="There is no such order. I am sorry."),
)
ROUTING = ExpertRouting(n_layers=4, top_k=8, n_experts=300)
POLICY = Script(
    [
        ScriptedProblem(match="I think of a number", branches=(Branch(name="halving", turns=tuple(HALVING)),)),
        ScriptedProblem(match="Please cancel my order.", branches=(Branch(name="clerk", turns=CLERK),)),
    ]
)
CUSTOMER = Script(
    [
        ScriptedProblem(
            match="Hello, how can I help?",
            branches=(
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
    """Yield a farm with the example's environments, and the address of the customer's model."""
    if missing := NamespaceProvider().missing():
        absent(missing)
    with farm_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder / "site"))
        with (
            installed(ROOT / "examples" / "environment", folder / "site"),
            serving(EngineDouble(POLICY, experts=ROUTING).app()) as policy,
            serving(EngineDouble(CUSTOMER).app()) as customer,
            embedded(folder, FARM_POLICY_URL=f"{policy}/v1", PYTHONPATH=str(folder / "site")) as here,
            farm.connect(here.store_url, broker_url=here.broker_url) as connected,
        ):
            assert isinstance(connected, LocalFarm)
            until(lambda: connected.engines()[0].engine.info is not None, "the engine was asked what it can do")
            yield connected, f"{customer}/v1"


def test_rewards_of_turns_are_stored_with_their_calls_and_tokens(client: tuple[LocalFarm, str]) -> None:
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
    # the environment's messages are in the row, and not trained on
    assert 0 < segment.response_mask.sum() < len(segment.response_mask)
    rows = arrays(rollouts)
    assert rows.turn_rewards.sum(axis=1) == pytest.approx(rows.rewards, abs=1e-5)
    assert np.all(rows.turn_rewards[rows.response_mask == 0] == 0)


def test_experts_of_each_token_are_stored_with_its_row(client: tuple[LocalFarm, str]) -> None:
    connected, _ = client
    fields = {"environment": "guessing_game", "seed": 3}
    request = {"instances": [{"data_source": "environment", "fields": fields}], "n_samples": 2}
    batch_id = connected.submit(request | {"sampling": {"routed_experts": 8}})
    rollouts = connected.collect(batch_id)
    assert [each.failure for each in rollouts] == [None] * 2
    with shown_key(), served(connected) as url, farm.connect(url) as remote:
        [row] = remote.collect(batch_id)[0].segments
    rows = arrays(rollouts)
    assert rows.routed_experts.shape == (2, rows.prompt_ids.shape[1] + rows.response_ids.shape[1], 4, 8)
    for index, rollout in enumerate(rollouts):
        (segment,) = rollout.segments
        ids = np.concatenate([segment.prompt_ids, segment.response_ids])
        expected = ROUTING.of(ids, "default")
        experts = segment.routed_experts
        assert experts is not None
        # several turns, with the environment's messages between them: all but the last token was an input of the model
        assert len(connected.calls(rollout.rollout_id)) > 1
        assert experts.known.tolist() == [1] * (len(ids) - 1) + [0]
        assert np.array_equal(experts.ids[:-1], expected[:-1])
        known = rows.experts_known[index] == 1
        assert np.array_equal(rows.routed_experts[index][known], expected[:-1])
        assert not rows.routed_experts[index][~known].any()
    assert row.routed_experts is not None
    [here] = rollouts[0].segments
    assert here.routed_experts is not None
    assert np.array_equal(row.routed_experts.ids, here.routed_experts.ids)
    assert row.routed_experts.ids.dtype == np.uint16


def test_row_per_call_has_the_experts_of_its_tokens(client: tuple[LocalFarm, str]) -> None:
    connected, _ = client
    fields = {"environment": "guessing_game", "seed": 3}
    request = {"instances": [{"data_source": "environment", "fields": fields}], "row_builder": "per_call"}
    (rollout,) = connected.collect(connected.submit(request | {"sampling": {"routed_experts": 8}}))
    assert len(rollout.segments) == len(connected.calls(rollout.rollout_id)) > 1
    for segment in rollout.segments:
        ids = np.concatenate([segment.prompt_ids, segment.response_ids])
        experts = segment.routed_experts
        assert experts is not None
        # the last token of an earlier call was an input of the next
        assert experts.first_unknown == len(ids) - (segment is rollout.segments[-1])
        n = experts.first_unknown
        assert np.array_equal(experts.ids[:n], ROUTING.of(ids, "default")[:n])


def test_batch_without_routed_experts_has_none(client: tuple[LocalFarm, str]) -> None:
    connected, _ = client
    fields = {"environment": "guessing_game", "seed": 3}
    rollouts = connected.collect(connected.submit({"instances": [{"data_source": "environment", "fields": fields}]}))
    assert [row.routed_experts for each in rollouts for row in each.segments] == [None]
    assert arrays(rollouts).routed_experts.shape == (1, 0, 0, 0)


def test_wrong_number_of_experts_fails_the_rollout_and_is_named(client: tuple[LocalFarm, str]) -> None:
    connected, _ = client
    fields = {"environment": "guessing_game", "seed": 3}
    request = {"instances": [{"data_source": "environment", "fields": fields}], "sampling": {"routed_experts": 4}}
    (rollout,) = connected.collect(connected.submit(request | {"max_attempts": 1}))
    assert rollout.failure is not None
    assert rollout.reward is None
    assert "sampling.routed_experts is 4" in rollout.failure.message


def test_simulated_user_is_recorded_and_not_trained(client: tuple[LocalFarm, str]) -> None:
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
    shown = tools_by_call(calls)
    assert "cancel_order" in [tool["function"]["name"] for tool in shown[0]]
    assert all(tools == shown[0] for tools in shown.values())
    assert [call.tools is None for call in calls] == [False, *[True] * (len(calls) - 1)], "they are stored once"
    (segment,) = rollout.segments
    assert int(segment.response_mask.sum()) == sum(call.n_response_tokens for call in calls)
    (kept,) = [each for each in connected.artefacts(rollout.rollout_id) if "role-calls" in each.name]
    lines = connected.artefact(rollout.rollout_id, kept.name).splitlines()
    assert [json.loads(line)["reply"] for line in lines] == [
        "Please cancel my order.",
        "The one of today.",
        "Well. ###STOP###",
    ]


def test_batch_without_the_required_user_role_is_refused(client: tuple[LocalFarm, str]) -> None:
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


def test_check_reports_a_deterministic_environment(client: tuple[LocalFarm, str]) -> None:
    words = ["check", "guessing_game", "--seed", "3", "--action", "<guess>5</guess>"]
    done = completed("workers.cli.environment_check", words, os.environ)
    assert "guessing_game: deterministic over 1 steps" in done.stdout, done.stderr


def test_check_accepts_a_range_of_rewards(client: tuple[LocalFarm, str]) -> None:
    words = ["check", "guessing_game", "--seed", "3", "--action", "<guess>5</guess>", "--rewards", "0", "0.01"]
    done = completed("workers.cli.environment_check", words, os.environ)
    assert done.returncode == 1
    assert "as the reward, outside of 0 to 0.01" in done.stderr
