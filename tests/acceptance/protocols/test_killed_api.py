"""An API killed half way, in each protocol: its client asks again by its id, and gets the rollouts that it began."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

import farm
from farm.embedded.embedded_farm import Embedded
from tests.doubles import EngineDouble
from tests.services.api import KEY, RestartableApi, mortal_api
from tests.services.farms import embedded, farm_folder, until
from tests.services.wire_clients import WireClient
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

N = 3
QUESTION = "How many hops?"
CHAT = {"question": QUESTION, "expected": "three"}
RIGHT = Branch(name="right", turns=(ScriptedTurn(content="three"),))
Tokens = list[tuple[list[int], list[int], float]]


@dataclass(frozen=True)
class Setting:
    """A farm with an engine that takes its time, and an API that may be killed."""

    farm: Embedded
    api: RestartableApi
    double: EngineDouble
    engine: str


@pytest.fixture(scope="module")
def setting() -> Iterator[Setting]:
    double = EngineDouble(Script([ScriptedProblem(match=QUESTION, plays=(RIGHT,))]), tokens_per_s=4)
    with (
        farm_folder() as folder,
        serving(double.app()) as engine,
        embedded(folder, FARM_POLICY_URL=f"{engine}/v1") as started,
        mortal_api(started.home, folder / "api.log", KEY, "--speak", "agent-lightning,nemo-gym,polar") as api,
    ):
        until(api.listens, "the API listens")
        yield Setting(started, api, double, engine)


def asked_in_nemo_gym(client: WireClient) -> Callable[[], Tokens]:
    params = {"input": [{"role": "user", "content": QUESTION}]}
    row = {"responses_create_params": params, "agent_ref": {"name": "chat"}, **CHAT}
    rows = [{**row, "_ng_rollout_id": f"step-{index}"} for index in range(N)]
    answers: list[Future[httpx2.Response]] = [client.later("/run", row) for row in rows]

    def again() -> Tokens:
        assert all(isinstance(answer.exception(60), httpx2.TransportError) for answer in answers), "all were cut"
        results = [client.said("/run", row)[1] for row in rows]
        items = [result["response"]["output"][-1] | {"reward": result["reward"]} for result in results]
        return [(item["prompt_token_ids"], item["generation_token_ids"], item["reward"]) for item in items]

    return again


def asked_in_agent_lightning(client: WireClient) -> Callable[[], Tokens]:
    names = [f"r{index}" for index in range(N)]
    rollouts = [{"input": {"data_source": "chat", "fields": CHAT}, "rollout_id": name} for name in names]
    assert client.post("/api/rollouts", rollouts).status_code == 201

    def state(name: str) -> Any:
        return client.get(f"/api/rollouts/{name}").json()["rollout"]["status"]["state"]

    def again() -> Tokens:
        assert client.post("/api/rollouts", rollouts).status_code == 201
        until(lambda: {state(name) for name in names} == {"succeeded"}, "all have ended")
        result: Tokens = []
        for name in names:
            call, reward = (event["data"] for event in client.get(f"/api/rollouts/{name}/events?format=triplet").json())
            result.append((call["prompt_token_ids"], call["response_token_ids"], reward["value"]))
        return result

    return again


def asked_in_polar(client: WireClient) -> Callable[[], Tokens]:
    evaluator = {"strategy": "chat", "config": {"expected": "three"}}
    task = {"task_id": "t", "num_samples": N, "agent": {}, "evaluator": evaluator, "instruction": QUESTION}
    assert client.post("/rollout/task/submit", task).status_code == 200

    def again() -> Tokens:
        assert client.post("/rollout/task/submit", task).status_code == 200
        until(lambda: client.get("/rollout/task/t").json()["status"] == "completed", "the task has ended")
        results = client.get("/rollout/task/t").json()["results"]
        traces = [trace for result in results for trace in result["trajectory"]["traces"]]
        return [(trace["prompt_ids"], trace["response_ids"], trace["reward"]) for trace in traces]

    return again


@pytest.mark.parametrize(
    ("protocol", "ask", "n_batches"),
    [
        ("nemo-gym", asked_in_nemo_gym, N),
        ("agent-lightning", asked_in_agent_lightning, N),
        ("polar", asked_in_polar, 1),
    ],
)
def test_a_client_that_asks_again_gets_the_rollouts_that_it_began(
    setting: Setting, protocol: str, ask: Callable[[WireClient], Callable[[], Tokens]], n_batches: int
) -> None:
    with farm.connect(setting.farm.home) as client, ThreadPoolExecutor(N) as pool:
        before = set(client.recent(100))
        again = ask(WireClient(f"{setting.api.url}/{protocol}", pool))
        until(lambda: setting.double.n_running == N, "all are sampled")
        setting.api.kill()
        setting.api.start()
        until(setting.api.listens, "the API listens again")
        tokens = again()
        mine = [batch_id for batch_id in client.recent(100) if batch_id not in before]
        assert len(mine) == n_batches, "no request began a second rollout"
        rollouts = [rollout for batch_id in mine for rollout in client.collect(batch_id)]
        expected = [
            (segment.prompt_ids.tolist(), segment.response_ids.tolist(), rollout.reward)
            for rollout in rollouts
            for segment in rollout.segments
        ]
        assert len(tokens) == N
        assert sorted(tokens) == sorted(expected)
