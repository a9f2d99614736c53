"""Agent Lightning's gateway on a store: a recorded conversation for each endpoint, and refused requests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from farm.client.local import LocalFarm
from farm.notifications import Signals
from farm.records.rollout import Stage
from farm.store.database import Store
from tests.contract.store.test_store import claimed, fail, place
from tests.services.api import served
from tests.services.farms import until
from tests.services.wire_clients import WireClient, run_two_turns, submitted

SERVER = {"model": "m", "endpoint": "http://127.0.0.1:9/v1", "version": 0}
INPUT = {"data_source": "noop", "data_id": "d7", "seconds": 0.0}
NEW = {"input": INPUT, "is_train": True, "config": {"timeout_seconds": 60}, "metadata": {}, "rollout_id": "r1"}
ONE = "/api/rollouts/r1"


@pytest.fixture
def service(sqlite_store: Store) -> LocalFarm:
    return LocalFarm(sqlite_store, Signals(""), 1_000_000)


@pytest.fixture
def client(service: LocalFarm) -> Iterator[WireClient]:
    with served(service, speak=("agent-lightning",)) as url, ThreadPoolExecutor(2) as pool:
        client = WireClient(f"{url}/agent-lightning", pool)
        assert client.reply("/api/models", [SERVER]) == (201, [SERVER])
        yield client


def state(client: WireClient, name: str = "r1") -> str:
    return str(client.get(f"/api/rollouts/{name}").json()["rollout"]["status"]["state"])


def test_rollout_is_created_read_and_deleted(client: WireClient, service: LocalFarm) -> None:
    status, [created] = client.reply("/api/rollouts", [NEW])
    life = created.pop("status")
    config = {"timeout_seconds": 60.0, "local": None, "k8s": None}
    expected = {**NEW, "config": config, "metadata": {"batch_idx": None, "sample_idx_in_batch": None}}
    assert (status, created) == (201, expected)
    assert (life["state"], life["version"], life["last_attempt_id"]) == ("queuing", 1, None)
    [batch_id] = submitted(service)
    assert client.reply("/api/rollouts", [NEW, NEW])[1][1] == {**created, "status": life}, "it is the same one"
    assert service.recent() == [batch_id]
    assert [each["rollout_id"] for each in client.get("/api/rollouts?state_in=queuing&state_in=running").json()] == [
        "r1"
    ]
    assert client.get("/api/rollouts?state_in=succeeded").json() == []
    place(service.store, batch_id)
    run_two_turns(service.store, batch_id, reward=0.25)
    detail = client.get(ONE).json()
    assert (detail["rollout"]["status"]["state"], detail["attempts"]) == ("succeeded", ["0"])
    until(lambda: client.get("/api/rollouts/terminal").json()["total_terminal"] == 1, "its end is told")
    item = {"rollout_id": "r1", "state": "succeeded", "data_id": "d7", "is_train": True}
    assert client.get("/api/rollouts/terminal").json() == {"items": [item], "next_after": 1, "total_terminal": 1}
    assert client.get("/api/rollouts/terminal?after=1").json() == {"items": [], "next_after": 1, "total_terminal": 1}
    assert client.ask("DELETE", ONE).status_code == client.ask("DELETE", ONE).status_code == 204
    assert client.reply("/api/rollouts", [{**NEW, "rollout_id": "r2"}, NEW])[0] == 409, "a deleted id is used up"
    assert service.recent() == [batch_id]
    missing = client.get(ONE)
    assert (missing.status_code, missing.json()) == (404, {"detail": "Rollout not found: r1"})
    assert client.get("/api/rollouts/terminal").json() == {"items": [], "next_after": 1, "total_terminal": 1}


def test_idempotency_keys_of_the_protocol_are_reserved(client: WireClient, service: LocalFarm) -> None:
    batches = str(client._http.base_url.join("/v1/batches"))
    batch = {"instances": [{"data_source": "noop", "fields": {}}], "n_samples": 2}
    refused = client.post(batches, {**batch, "idempotency_key": "agent-lightning:x"})
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "idempotency_key")
    assert client.post(batches, {**batch, "idempotency_key": "agent:lightning"}).is_success
    for batch_id in service.recent():
        service.cancel(batch_id)
    assert client.get("/api/rollouts?state_in=failed").json() == []
    assert client.get("/api/rollouts/terminal").json() == {"items": [], "next_after": 0, "total_terminal": 0}


def test_events_are_returned_as_triplets(client: WireClient, service: LocalFarm) -> None:
    client.post("/api/rollouts", [NEW])
    [batch_id] = submitted(service)
    assert client.get(f"{ONE}/events").json() == []
    run_two_turns(service.store, batch_id, reward=0.25)
    posted = client.reply(f"{ONE}/attempt/0/events", {"event_type": "note", "data": {"a": 1}})
    assert (posted[0], posted[1]["data"]) == (200, {"a": 1})
    triplets = client.get(f"{ONE}/events?format=triplet").json()
    assert [event["event_type"] for event in triplets] == ["model_request", "model_request", "reward", "note"]
    assert triplets[0]["data"] == {
        "prompt_token_ids": [1, 2, 3],
        "response_token_ids": [4, 5],
        "response_log_probs": [-0.5, -0.5],
        "server": {"model": None, "version": None},
        "http_status": 200,
        "status": "ok",
    }
    assert triplets[2]["data"] == {"value": 0.25, "source": "agent", "reason": "answered"}
    [reward] = client.get(f"{ONE}/events?event_type=reward&include_routed_experts=false").json()
    assert (reward["attempt_id"], reward["data"]["value"]) == ("0", 0.25)
    raw = client.get(f"{ONE}/events?event_type=model_request").json()
    assert [event["data"]["response"]["choices"][0]["token_ids"] for event in raw] == [[4, 5], [8]]


def test_failed_rollout_has_no_triplets(client: WireClient, service: LocalFarm) -> None:
    client.post("/api/rollouts", [NEW])
    [batch_id] = submitted(service)
    place(service.store, batch_id)
    fail(service.store, claimed(service.store, f"{batch_id}.0.0", Stage.INIT), None)
    status = client.get(ONE).json()["rollout"]["status"]
    assert status["state"] == "failed"
    assert status["error_message"]
    assert client.get(f"{ONE}/events?format=triplet").json() == []


def test_client_may_end_a_rollout_only_as_failed(client: WireClient) -> None:
    client.post("/api/rollouts", [NEW])
    refused = client.ask("PATCH", ONE, {"status": {"state": "succeeded"}})
    assert (refused.status_code, list(refused.json())) == (409, ["detail"])
    ended = client.ask("PATCH", ONE, {"status": {"state": "failed", "error_message": "gave up"}})
    assert (ended.status_code, ended.json()["status"]["state"], state(client)) == (200, "failed", "failed")
    assert client.ask("PATCH", ONE, {"status": {"state": "failed"}}).status_code == 409


def test_servers_are_paused_and_resumed_as_engines(client: WireClient, service: LocalFarm) -> None:
    service.add_engine("http://127.0.0.1:8/v1", "other")
    paused = {"paused": True, "retry_after_seconds": 5, "reason": "step 3", "inflight": 0}
    assert client.reply("/proxy/pause", {"reason": "step 3"}) == (200, paused)
    assert client.get("/proxy/state").json() == paused
    orders = {each.engine.url: each.engine.paused for each in service.engines()}
    assert orders == {SERVER["endpoint"]: "drain", "http://127.0.0.1:8/v1": ""}
    client.post("/api/models", [{"model": "m", "endpoint": "http://127.0.0.1:7/v1"}])
    assert [each.engine.paused for each in service.engines()] == ["drain", "", "drain"], "a new one waits, too"
    assert client.reply("/proxy/resume") == (200, {**paused, "paused": False, "reason": None})
    assert {each.engine.paused for each in service.engines()} == {""}
    assert client.ask("DELETE", "/api/models").json() == {"status": "ok"}
    assert [each.engine.url for each in service.engines()] == ["http://127.0.0.1:8/v1"], "only its own"


_REFUSED: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/api/rollouts", {}, 422, "list"),
    ("POST", "/api/rollouts", [{}], 422, "rollouts[0]"),
    ("POST", "/api/rollouts", [NEW, {**NEW, "rollout_id": "r2", "nope": 1}], 422, "nope"),
    ("POST", "/api/rollouts", [NEW, {**NEW, "rollout_id": "r2", "input": {"data_source": "nobody"}}], 400, "nobody"),
    ("POST", "/api/rollouts", [NEW, {**NEW, "rollout_id": "r2", "input": {"a": 1}}], 422, "data_source"),
    ("POST", "/api/rollouts", [NEW, {**NEW, "rollout_id": "r2", "input": {**INPUT, "seconds": "x"}}], 422, "seconds"),
    ("POST", "/api/rollouts", [NEW, {**NEW, "input": {**INPUT, "seconds": 1.0}}], 409, "another rollout"),
    ("POST", "/api/rollouts", [{**NEW, "config": {"k8s": {"job_template": "x"}}}], 422, "k8s"),
    ("POST", "/api/rollouts", [{**NEW, "config": {"local": {"env_map": {"A": "b"}}}}], 422, "env_map"),
    ("POST", "/api/rollouts", [{**NEW, "config": {"timeout_seconds": 0}}], 422, "timeout_seconds"),
    ("POST", "/api/models", [{"model": "m", "endpoint": "nowhere"}], 422, "models[0]"),
    ("POST", "/api/models", [{"model": "", "endpoint": "http://h:1"}], 422, "model"),
    ("POST", "/proxy/pause", {"retry_after_seconds": -1}, 422, "retry_after_seconds"),
    ("GET", "/api/rollouts", None, 422, "state_in"),
    ("GET", "/api/rollouts?state_in=sleeping", None, 422, "state_in"),
    ("GET", f"/api/rollouts/terminal?after={10**20}", None, 422, "after"),
    ("GET", "/api/rollouts/none", None, 404, "Rollout not found: none"),
    ("GET", "/api/rollouts/none/events", None, 404, "Rollout not found: none"),
    ("POST", "/api/rollouts/none/attempt/0/events", {"event_type": "x"}, 404, "Rollout not found: none"),
    ("PATCH", "/api/rollouts/none", {"status": {"state": "failed"}}, 404, "Rollout not found: none"),
    ("POST", "/proxy/rollout/r1/attempt/0/mode/train/openai/v1/chat/completions", {}, 404, "not proxied"),
    ("PUT", "/api/models", None, 405, "there is no"),
]


def test_invalid_requests_are_refused_in_protocol_form_without_effect(client: WireClient, service: LocalFarm) -> None:
    for method, path, body, status, words in _REFUSED:
        answer = client.ask(method, path, body)
        assert (answer.status_code, list(answer.json())) == (status, ["detail"]), (path, body, answer.text)
        assert words in answer.text, (path, body, answer.text)
    assert service.recent() == []
    assert [each.engine.url for each in service.engines()] == [SERVER["endpoint"]]


def test_rollout_without_a_server_is_refused(client: WireClient, service: LocalFarm) -> None:
    client.ask("DELETE", "/api/models")
    status, answer = client.reply("/api/rollouts", [NEW])
    assert (status, service.recent()) == (503, [])
    assert "POST /api/models" in answer["detail"]
