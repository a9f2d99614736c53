"""rLLM runs its tasks on the farm: its engine, its gateway's sessions, its grouping, and the farm's scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from farm.client.local import LocalFarm
from tests.conftest import absent
from tests.doubles import EngineDouble
from tests.services.farms import NOOP
from tests.trainers.conftest import N_PROMISES, QUESTION, SCRIPT, Program
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

SESSION_KEY = "sk-of-one-session"
RIGHT = Branch(name="right", turns=(ScriptedTurn(content="three"),))
CHAT: dict[str, Any] = {"data_source": "chat", "fields": {"question": QUESTION, "expected": "three"}}


def test_rllm_runs_its_tasks_on_the_farm_and_trains_on_its_own_tokens(
    run: Program, client: LocalFarm, trainers: Path
) -> None:
    source = trainers / "rllm"
    if not (source / "rllm").exists():
        absent(f"the source of rLLM is not in {source}: tests/trainers/environment.sh could not fetch it")
    worker = EngineDouble(SCRIPT)
    keyed = EngineDouble(Script([ScriptedProblem(match=QUESTION, branches=(RIGHT,))]), key=SESSION_KEY)
    broken = {"data_source": "noop", "fields": {"fail": "run:agent_error"}}
    slow = {"data_source": "noop", "fields": {"seconds": 300}}
    with serving(worker.app()) as address, serving(keyed.app()) as keyed_address:
        given = {
            "worker": address,
            "model": worker.machine.name,
            "tasks": [*[CHAT] * 6, broken, NOOP],
            "task_ids": [*["chat"] * 6, "broken", "noop"],
            "slow": slow,
            "keyed_url": f"{keyed_address}/v1",
            "key": SESSION_KEY,
        }
        result = run("rllm_episodes", json.dumps(given), path=source)
        *chats, broke, unasked = result["episodes"]
        ids = [episode["metadata"]["farm"]["rollout_id"] for episode in result["episodes"]]
        rollouts = [client.rollout(rollout_id) for rollout_id in ids]
        # each episode has the farm's score, and exactly the tokens of the farm's calls as rLLM's gateway kept them
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
        # broken rollouts are marked, and rLLM's filter omits them
        assert (broke["reason"], rollouts[6].reward) == ("ERROR", None)
        assert ids[6] in broke["metadata"]["error"]["error_message"]
        assert (unasked["rewards"], unasked["steps"]) == ([1.0], [])
        assert [len(rewards) for rewards in result["groups"].values()] == [6]
        # tasks that timed out and tasks that cannot be run have no reward
        late, wrong, no_address, with_key = result["results"]
        assert [each["finished"] for each in result["results"]] == [False, False, False, True]
        assert [each["reward"] for each in result["results"]] == [None, None, None, 1.0]
        assert with_key["reason"] == "ENV_DONE"
        assert "no end in 3" in late["error"]
        assert "data_source" in wrong["error"]
        assert "engine_url" in no_address["error"]
        assert SESSION_KEY not in str(result)
        assert result["used"]
        assert client.wait(late["error"].split()[1].split(".")[0], 120).n_cancelled == 1


def test_rllm_results_keep_the_promises_of_result_adapters(run: Program, trainers: Path) -> None:
    source = trainers / "rllm"
    if not (source / "rllm").exists():
        absent(f"the source of rLLM is not in {source}: tests/trainers/environment.sh could not fetch it")
    faults = run("results_examined", "farm.adapters.rllm", path=source)
    assert len(faults) == N_PROMISES
    assert not any(faults.values()), faults
