"""rLLM plays its tasks on the farm: its engine, its gateway's sessions, its grouping, and the farm's scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import farm
from farm.client.local import LocalFarm
from farm.embedded.embedded_farm import Embedded
from tests.doubles import EngineDouble
from tests.services.api import served, shown_key
from tests.services.farms import NOOP, embedded, farm_folder
from tests.trainers.programs import result_of
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

SESSION_KEY = "sk-of-one-session"
QUESTION = "How many hops?"
RIGHT = Branch(name="right", turns=(ScriptedTurn(content="three"),))
WRONG = Branch(name="wrong", turns=(ScriptedTurn(content="four"),))
CHAT: dict[str, Any] = {"data_source": "chat", "fields": {"question": QUESTION, "expected": "three"}}


@pytest.fixture(scope="module")
def here() -> Iterator[Embedded]:
    with farm_folder() as folder, embedded(folder) as started:
        yield started


def test_rllm_plays_its_tasks_on_the_farm_and_trains_on_its_own_tokens(here: Embedded) -> None:
    worker = EngineDouble(Script([ScriptedProblem(match=QUESTION, plays=(RIGHT, WRONG))]))
    keyed = EngineDouble(Script([ScriptedProblem(match=QUESTION, plays=(RIGHT,))]), key=SESSION_KEY)
    broken = {"data_source": "noop", "fields": {"fail": "run:agent_error"}}
    slow = {"data_source": "noop", "fields": {"seconds": 300}}
    with (
        farm.connect(here.store_url, broker_url=here.broker_url) as client,
        shown_key(),
        serving(worker.app()) as address,
        serving(keyed.app()) as keyed_address,
    ):
        assert isinstance(client, LocalFarm)
        with served(client) as url:
            result = result_of(
                "rllm_program",
                home=str(here.home),
                farm=url,
                worker=address,
                model=worker.machine.name,
                tasks=[*[CHAT] * 6, broken, NOOP],
                task_ids=[*["chat"] * 6, "broken", "noop"],
                slow=slow,
                keyed_url=f"{keyed_address}/v1",
                key=SESSION_KEY,
            )
        *chats, broke, unasked = result["episodes"]
        ids = [episode["metadata"]["farm"]["rollout_id"] for episode in result["episodes"]]
        rollouts = [client.rollout(rollout_id) for rollout_id in ids]
        # each episode has the farm's score, and the tokens of the farm's calls as rLLM's gateway kept them, and no more
        assert [episode["rewards"] for episode in chats] == [[rollout.reward] for rollout in rollouts[:6]]
        assert {rollout.reward for rollout in rollouts[:6]} == {0.0, 1.0}
        assert worker.n_started == 6
        for episode, rollout_id in zip(chats, ids, strict=False):
            (call,) = client.calls(rollout_id)
            (step,) = episode["steps"]
            assert len(step["prompt_ids"]) == call.n_prompt_tokens
            assert len(step["response_ids"]) == len(step["logprobs"]) == call.n_response_tokens
            assert "/sessions/" in call.engine
            assert episode["reason"] == "ENV_DONE"
        # what broke says so, and rLLM's filter leaves it out
        assert (broke["reason"], rollouts[6].reward) == ("ERROR", None)
        assert ids[6] in broke["metadata"]["error"]["error_message"]
        assert (unasked["rewards"], unasked["steps"]) == ([1.0], [])
        assert [len(rewards) for rewards in result["groups"].values()] == [6]
        # neither what was not played in time nor what cannot be played has a reward
        late, wrong, no_address, with_key = result["results"]
        assert [each["finished"] for each in result["results"]] == [False, False, False, True]
        assert [each["reward"] for each in result["results"]] == [None, None, None, 1.0]
        assert with_key["reason"] == "ENV_DONE"
        assert "no end in 3" in late["error"]
        assert "data_source" in wrong["error"]
        assert "engine_url" in no_address["error"]
        assert SESSION_KEY not in str(result)
        assert client.wait(late["error"].split()[1].split(".")[0], 120).n_cancelled == 1
