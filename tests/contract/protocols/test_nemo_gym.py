"""NeMo Gym's agent server on a store: a recorded conversation for each endpoint, and refused requests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from farm.client.local import LocalFarm
from farm.notifications import Signals
from farm.records.rollout import Stage
from farm.store import batches
from farm.store.database import Store
from tests.contract.store.test_store import claimed, fail, place
from tests.services.api import served
from tests.services.farms import until
from tests.services.wire_clients import BASH, WireClient, run_two_turns, submitted

MODEL = "http://127.0.0.1:9/v1"
ROW = {
    "agent_ref": {"type": "responses_api_agents", "name": "noop"},
    "responses_create_params": {"input": [{"role": "user", "content": "u"}], "temperature": 0.5},
    "policy_base_url": MODEL,
    "policy_model_name": "m",
    "policy_api_key": "of-the-trainer",
    "_ng_task_index": 3,
    "_ng_rollout_index": 1,
}
NAMED = {**ROW, "_ng_rollout_id": "step7-3-1"}


@pytest.fixture
def service(sqlite_store: Store) -> LocalFarm:
    return LocalFarm(sqlite_store, Signals(""), 1_000_000)


@pytest.fixture
def client(service: LocalFarm) -> Iterator[WireClient]:
    with served(service, speak=("nemo-gym",)) as url, ThreadPoolExecutor(8) as pool:
        yield WireClient(f"{url}/nemo-gym", pool)


def test_result_is_the_row_with_response_and_reward(client: WireClient, service: LocalFarm) -> None:
    answer = client.later("/run", NAMED)
    [batch_id] = submitted(service)
    request = service.store.read(partial(batches.request_of, batch_id=batch_id))
    assert (request["sampling"]["temperature"], request["engines"][0]["engine_url"]) == (0.5, MODEL)
    run_two_turns(service.store, batch_id)
    result = answer.result(60).json()
    response = result.pop("response")
    expected = {name: value for name, value in NAMED.items() if name != "policy_api_key"}
    expected |= {"reward": 1.0, "mask_sample": False, "failure_kind": None, "failure_reason": None}
    assert result == expected | {"rollout_id": f"{batch_id}.0.0"}
    assert "of-the-trainer" not in answer.result().text
    logprobs = {"generation_log_probs": [-0.5, -0.5]}
    first = {"prompt_token_ids": [1, 2, 3], "generation_token_ids": [4, 5]} | logprobs
    last: dict[str, Any] = {"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7], "generation_token_ids": [8]}
    called = {"type": "function_call", "call_id": "1", "name": "bash", "arguments": "{}", "status": "completed"}
    content = [{"type": "output_text", "text": "done", "annotations": []}]
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}
    assert response["output"] == [
        called | first,
        {"type": "function_call_output", "call_id": "1", "output": "out"},
        message | last | {"generation_log_probs": [-0.5]},
    ]
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "m")
    assert response["usage"]["total_tokens"] == 13
    from openai.types.responses import FunctionTool

    [tool] = response["tools"]
    assert tool == {"type": "function", "strict": None, **BASH["function"]}
    FunctionTool.model_validate(tool, strict=True)
    assert client.reply("/run", NAMED) == (200, answer.result().json()), "asked again, it is the same"


def test_answered_rows_with_only_indices_run_again(client: WireClient, service: LocalFarm) -> None:
    answers = [client.later("/run", ROW), client.later("/run", ROW)]
    [batch_id] = submitted(service)
    until(lambda: service.has_open(batch_id), "it runs")
    run_two_turns(service.store, batch_id)
    assert {answer.result(60).json()["rollout_id"] for answer in answers} == {f"{batch_id}.0.0"}
    again = client.later("/run", ROW)
    newest, _ = submitted(service, 2)
    run_two_turns(service.store, newest, reward=0.0)
    assert (again.result(60).json()["rollout_id"], again.result().json()["reward"]) == (f"{newest}.0.0", 0.0)


def test_rows_without_an_id_are_separate_rollouts(client: WireClient, service: LocalFarm) -> None:
    row = {name: value for name, value in ROW.items() if not name.startswith("_ng_")}
    answers = [client.later("/run", row), client.later("/run", row)]
    for batch_id in submitted(service, 2):
        run_two_turns(service.store, batch_id)
    assert len({answer.result(60).json()["rollout_id"] for answer in answers}) == 2


def test_failed_rollout_has_a_failure_class_and_no_reward(client: WireClient, service: LocalFarm) -> None:
    answer = client.later("/run", NAMED)
    [batch_id] = submitted(service)
    place(service.store, batch_id)
    fail(service.store, claimed(service.store, f"{batch_id}.0.0", Stage.INIT), None)
    result = answer.result(60).json()
    assert not {"reward", "response"} & result.keys()
    assert (result["mask_sample"], result["_ng_failure_class"]) == (True, result["failure_kind"])
    assert batch_id in result["_ng_failure_message"]
    another = client.later("/run", {**NAMED, "_ng_attempt_index": 1})
    newest, _ = submitted(service, 2)
    service.cancel(newest)
    assert another.result(60).json()["failure_kind"] == "cancelled", "its next attempt is another rollout"


def test_metrics_cover_only_rows_with_a_reward(client: WireClient) -> None:
    results = [
        {"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0, "response": {"usage": {"input_tokens": 4}}},
        {"_ng_task_index": 0, "_ng_rollout_index": 1, "reward": 0.0, "response": {"usage": "x"}, "huge": 1e308},
        {"_ng_task_index": 1, "_ng_rollout_index": 0, "mask_sample": True, "reward": 0.0},
        {"_ng_task_index": 1, "_ng_rollout_index": 1, "_ng_failure_class": "verifier_error"},
    ]
    status, metrics = client.reply("/aggregate_metrics", {"verify_responses": results})
    assert (status, metrics["key_metrics"]["mean/reward"], metrics["agent_metrics"]["max/input_tokens"]) == (
        200,
        0.5,
        4,
    )
    assert metrics["key_metrics"]["coverage/masked_rollouts"] == 2
    assert metrics["key_metrics"]["coverage/fully_masked_tasks"] == 1
    assert [(task["_ng_task_index"], task["mean/reward"]) for task in metrics["group_level_metrics"]] == [(0, 0.5)]
    assert [repeat["mean/reward"] for repeat in metrics["repeat_level_metrics"]] == [1.0, 0.0]
    assert client.reply("/aggregate_metrics", {"verify_responses": []})[1]["agent_metrics"] == {}


def _params(**changed: Any) -> dict[str, Any]:
    return {**ROW, "responses_create_params": {"input": "u", **changed}}


_REFUSED: list[tuple[str, Any, int, str]] = [
    ("/run", {}, 422, "responses_create_params"),
    ("/run", [], 422, "valid dictionary"),
    ("/run", _params(nope=1), 422, "nope"),
    ("/run", _params(tools=[{"type": "function"}]), 422, "tools"),
    ("/run", _params(max_tool_calls=3), 422, "max_tool_calls"),
    ("/run", _params(temperature=9), 422, "temperature"),
    ("/run", _params(stream=True), 422, "stream"),
    ("/run", _params(metadata={"chat_template_kwargs": "["}), 422, "chat_template_kwargs"),
    ("/run", {**ROW, "agent_ref": {"name": "nobody"}}, 400, "not registered: 'nobody'"),
    ("/run", {**ROW, "agent_ref": None}, 422, "must name an agent"),
    ("/run", {**ROW, "seconds": "x"}, 422, "seconds"),
    ("/run", {**ROW, "unknown": 1}, 422, "unknown"),
    ("/run", {**ROW, "agent_ref": {"name": "mcqa_simple_agent"}}, 422, "gold answer"),
    ("/run", {**ROW, "policy_base_url": "nowhere"}, 422, "policy_base_url"),
    ("/run", {**ROW, "policy_api_key": "a b"}, 422, "policy_api_key"),
    ("/run", {**ROW, "policy_base_url": ""}, 503, "no model server"),
    ("/run", {**ROW, "_ng_rollout_id": "../x"}, 422, "_ng_rollout_id"),
    ("/run", {**ROW, "_ng_task_index": -1}, 422, "_ng_task_index"),
    ("/run", {**ROW, "_ng_attempt_index": "1.5"}, 422, "_ng_attempt_index"),
    ("/aggregate_metrics", {"verify_responses": 1}, 422, "verify_responses"),
    ("/v1/responses", {"input": "u"}, 501, "send a row to /run"),
    ("/verify", {}, 404, "there is no"),
]


def test_invalid_requests_are_refused_in_protocol_form_without_effect(client: WireClient, service: LocalFarm) -> None:
    for path, body, status, words in _REFUSED:
        answer = client.post(path, body)
        assert (answer.status_code, list(answer.json())) == (status, ["detail"]), (path, body, answer.text)
        assert words in answer.text, (path, body, answer.text)
    assert service.recent() == []
    assert [client.get(path).status_code for path in ("", "/health", "/healthz")] == [200] * 3


def test_rollout_id_of_a_different_request_is_refused(client: WireClient, service: LocalFarm) -> None:
    first = client.later("/run", NAMED)
    [batch_id] = submitted(service)
    status, answer = client.reply("/run", {**NAMED, "seconds": 1.0})
    assert (status, len(service.recent())) == (409, 1)
    assert "'step7-3-1' belongs to a different request" in answer["detail"]
    service.cancel(batch_id)
    first.result(60)
