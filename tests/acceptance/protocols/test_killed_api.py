"""An API, its client or both killed in the middle, in each protocol: a repeated request gets its own rollouts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest

import farm
from farm.embedded.embedded_farm import Embedded
from tests.doubles import EngineDouble
from tests.services.api import KEY, RestartableApi, killable_api
from tests.services.farms import embedded, farm_folder, until
from tests.services.wire_clients import WireClient
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

N = 3
QUESTION = "How many hops?"
CHAT = {"question": QUESTION, "expected": "three"}
RIGHT = Branch(name="right", turns=(ScriptedTurn(content="three"),))
Tokens: TypeAlias = list[tuple[list[int], list[int], float]]
"""Prompt, response and reward of each rollout, as returned by a protocol."""


@dataclass(frozen=True)
class Setting:
    """A farm with a slow engine, and an API that can be killed."""

    farm: Embedded
    api: RestartableApi
    double: EngineDouble
    engine: str


@pytest.fixture(scope="module")
def setting() -> Iterator[Setting]:
    double = EngineDouble(Script([ScriptedProblem(match=QUESTION, branches=(RIGHT,))]), tokens_per_s=4)
    with (
        farm_folder() as folder,
        serving(double.app()) as engine,
        embedded(folder, FARM_POLICY_URL=f"{engine}/v1") as started,
        killable_api(started.home, folder / "api.log", KEY, "--speak", "agent-lightning,nemo-gym,polar") as api,
    ):
        until(api.listens, "the API listens")
        yield Setting(started, api, double, engine)


def ask_in_nemo_gym(client: WireClient) -> Tokens:
    params = {"input": [{"role": "user", "content": QUESTION}]}
    row = {"responses_create_params": params, "agent_ref": {"name": "chat"}, **CHAT}
    answers = [client.later("/run", {**row, "_ng_rollout_id": f"{client.name}-{index}"}) for index in range(N)]
    results = [answer.result().json() for answer in answers]
    items = [result["response"]["output"][-1] | {"reward": result["reward"]} for result in results]
    return [(item["prompt_token_ids"], item["generation_token_ids"], item["reward"]) for item in items]


def ask_in_agent_lightning(client: WireClient) -> Tokens:
    names = [f"{client.name}-{index}" for index in range(N)]
    rollouts = [{"input": {"data_source": "chat", "fields": CHAT}, "rollout_id": name} for name in names]
    assert client.post("/api/rollouts", rollouts).status_code == 201

    def state(name: str) -> Any:
        return client.get(f"/api/rollouts/{name}").json()["rollout"]["status"]["state"]

    until(lambda: {state(name) for name in names} == {"succeeded"}, "all have ended")
    result: Tokens = []
    for name in names:
        call, reward = (event["data"] for event in client.get(f"/api/rollouts/{name}/events?format=triplet").json())
        result.append((call["prompt_token_ids"], call["response_token_ids"], reward["value"]))
    return result


def ask_in_polar(client: WireClient) -> Tokens:
    evaluator = {"strategy": "chat", "config": {"expected": "three"}}
    task = {"task_id": client.name, "num_samples": N, "agent": {}, "evaluator": evaluator, "instruction": QUESTION}
    assert client.post("/rollout/task/submit", task).status_code == 200
    path = f"/rollout/task/{client.name}"
    until(lambda: client.get(path).json()["status"] == "completed", "the task has ended")
    traces = [trace for result in client.get(path).json()["results"] for trace in result["trajectory"]["traces"]]
    return [(trace["prompt_ids"], trace["response_ids"], trace["reward"]) for trace in traces]


CLIENTS: dict[str, tuple[Callable[[WireClient], Tokens], int]] = {
    "nemo-gym": (ask_in_nemo_gym, N),
    "agent-lightning": (ask_in_agent_lightning, N),
    "polar": (ask_in_polar, 1),
}
"""The conversation of a client of each protocol, from first request to last answer, and the number of its batches."""


def ask(protocol: str, url: str, name: str) -> Tokens:
    with ThreadPoolExecutor(N) as pool:
        return CLIENTS[protocol][0](WireClient(f"{url}/{protocol}", pool, name))


@pytest.mark.parametrize("killed", ["the API", "its client", "both"])
@pytest.mark.parametrize("protocol", CLIENTS)
def test_repeated_request_gets_its_rollouts_after_a_kill(setting: Setting, protocol: str, killed: str) -> None:
    url = setting.api.url
    name = f"{protocol}-{killed.replace(' ', '-')}"
    code = f"from {__name__} import ask; ask({protocol!r}, {url!r}, {name!r})"
    with farm.connect(setting.farm.home) as client:
        before = set(client.recent(100))
        first = subprocess.Popen([sys.executable, "-c", code])
        until(lambda: setting.double.n_running == N, "all are sampled")
        if killed != "the API":
            first.kill()
        if killed != "its client":
            setting.api.kill()
            setting.api.start()
            until(setting.api.listens, "the API listens again")
        tokens = ask(protocol, url, name)
        first.kill()
        first.wait()
        mine = [batch_id for batch_id in client.recent(100) if batch_id not in before]
        assert len(mine) == CLIENTS[protocol][1], "no request began a second rollout"
        rollouts = [rollout for batch_id in mine for rollout in client.collect(batch_id)]
        expected = [
            (segment.prompt_ids.tolist(), segment.response_ids.tolist(), rollout.reward)
            for rollout in rollouts
            for segment in rollout.segments
        ]
        assert len(tokens) == N
        assert sorted(tokens) == sorted(expected)
        assert {rollout.attempt for rollout in rollouts} == {1}, "none ran twice"
