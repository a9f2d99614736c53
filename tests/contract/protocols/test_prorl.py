"""ProRL's protocol on a store: a recorded conversation for each endpoint, and refusals without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import httpx2
import pytest

from farm.api.endpoints import ApiConfig
from farm.client.local import LocalFarm
from farm.notifications import Signals
from farm.records.rollout import Stage
from farm.settings import settings
from farm.store import batches
from farm.store.database import Store
from tests.contract.store.test_store import claimed, fail, place, run_to_end
from tests.services.api import served
from tests.services.wire_clients import BASH, WireClient, run_two_turns, submitted

INSTANCE = {"data_source": "noop", "instance_id": "p1", "trajectory_id": 0}
SAMPLING = {"model": "hosted_vllm/m", "temperature": 1.0, "max_iterations": 5}
BODY = {"instance": INSTANCE, "sampling_params": SAMPLING}
SERVER = "http://127.0.0.1:9"


@pytest.fixture
def service(sqlite_store: Store) -> LocalFarm:
    return LocalFarm(sqlite_store, Signals(""), 1_000_000)


def process(client: WireClient, body: dict[str, Any], place: str = "") -> Future[httpx2.Response]:
    return client.later(f"{place}/process", body)


def status(client: WireClient) -> tuple[int, Any]:
    answer = client.get("/status")
    return answer.status_code, answer.json()


@pytest.fixture
def client(service: LocalFarm) -> Iterator[WireClient]:
    with served(service, speak=("prorl",)) as url, ThreadPoolExecutor(8) as pool:
        yield WireClient(f"{url}/prorl", pool)


@pytest.fixture
def running(client: WireClient) -> WireClient:
    """Return a client with a server and a session."""
    client.post("/add_llm_server", {"address": SERVER})
    client.post("/start")
    return client


def test_session_starts_reports_its_status_and_stops(client: WireClient) -> None:
    not_running = (503, {"detail": "Server is not running. Please start the server first."})
    assert status(client) == not_running
    assert client.reply("/stop") == not_running
    assert client.reply("/process", BODY) == not_running
    assert client.reply("/cancel", {"job_id": "x"}) == not_running
    added = (200, {"status": f"Buffered LLM server address: {SERVER}"})
    assert client.reply("/add_llm_server", {"address": SERVER}) == added
    assert client.reply("/clear_llm_server") == (200, {"status": "Cleared buffered LLM server addresses"})
    assert client.reply("/start") == (200, {"status": "Server started successfully"})
    assert client.reply("/start") == (400, {"detail": "Server is already running"})
    no_server = "No LLM server addresses configured. Please add at least one LLM server address."
    assert client.reply("/process", BODY) == (503, {"detail": no_server})
    added = (200, {"status": f"Added LLM server address: {SERVER}"})
    assert client.reply("/add_llm_server", {"address": SERVER}) == added
    assert client.reply("/clear_llm_server") == (200, {"status": "Cleared all LLM server addresses"})
    by_process = {"status": "running", "pending_jobs": 0, "running": True, "jobs": 0, "init": 0, "run": 0, "eval": 0}
    by_thread = dict.fromkeys(("init_queue", "run_queue", "eval_queue"), 0)
    by_thread |= dict.fromkeys(("active_init", "active_run", "active_eval", "total"), 0)
    assert status(client) == (200, by_process | by_thread)
    assert client.reply("/cancel", {"job_id": "x"})[0] == 404
    assert client.reply("/stop") == (200, {"status": "Server stopped successfully"})
    assert status(client) == not_running


def test_result_has_the_fields_that_its_trainer_reads(running: WireClient, service: LocalFarm) -> None:
    answer = process(running, BODY)
    [batch_id] = submitted(service)
    assert status(running)[1]["pending_jobs"] == status(running)[1]["init_queue"] == 1
    run_two_turns(service.store, batch_id)
    result = answer.result(60).json()
    timing = result.pop("timing")
    assert timing["counted_elapsed"] == timing["init_time"] + timing["run_time"] + timing["eval_time"]
    assert timing["others_time"] >= 0
    assert timing["timeout_triggered"] is False
    put: dict[str, Any] = {"input_ids": None, "output_ids": None, "logprobs": None}
    first, second = {"input_ids": [1, 2, 3], "logprobs": [-0.5, -0.5]}, {"input_ids": [1, 2, 3, 4, 5, 6, 7]}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s", "token_ids": [1, 2, 3]} | put,
        {"role": "user", "content": "u", "token_ids": []} | put,
        {"role": "assistant", "content": "", "token_ids": [4, 5], "output_ids": [4, 5]} | first,
        {"role": "tool", "content": "out", "token_ids": [6, 7]} | put,
        {"role": "assistant", "content": "done", "token_ids": [8], "output_ids": [8], "logprobs": [-0.5]} | second,
    ]
    messages[2]["tool_calls"] = [{"name": "bash", "arguments": "{}"}]
    assert result == {
        "instance_id": "p1",
        "trajectory_id": 0,
        "resolved": True,
        "reward": 1.0,
        "score": 1.0,
        "critical_error": None,
        "success": True,
        "error": None,
        "finish": True,
        "git_patch": "diff",
        "messages": messages,
        "tools": [BASH],
        "end_properly": True,
        "filter": False,
        "rollout_id": f"{batch_id}.0.0",
    }


def test_failed_rollout_is_filtered_and_has_no_messages(running: WireClient, service: LocalFarm) -> None:
    answer = process(running, BODY)
    [batch_id] = submitted(service)
    place(service.store, batch_id)
    fail(service.store, claimed(service.store, f"{batch_id}.0.0", Stage.INIT), None)
    result = answer.result(60).json()
    assert (result["critical_error"], result["filter"], result["success"]) == ("init", True, False)
    assert (result["messages"], result["resolved"], result["reward"]) == ([], False, None)
    assert result["error"] == result["traceback"]


def test_stop_ends_only_the_jobs_of_its_client(running: WireClient, service: LocalFarm) -> None:
    running.post("/other/add_llm_server", {"address": SERVER})
    running.post("/other/start")
    foreign = service.submit({"instances": [{"data_source": "noop", "fields": {}}]})
    of_other = process(running, BODY, "/other")
    submitted(service, 2)
    mine = [process(running, {**BODY, "job_id": f"j{index}"}) for index in range(3)]
    ids = submitted(service, 5)
    assert running.reply("/cancel", {"job_id": "j0"}) == (200, {"status": "Cancel requested for job j0"})
    cancelled = mine[0].result(60).json()
    assert (cancelled["error"], cancelled["messages"], cancelled["filter"]) == ("cancelled", [], True)
    assert status(running)[1]["pending_jobs"] == 2
    assert running.reply("/cancel", {"job_id": "j0"})[0] == 200, "it is known, though it has ended"
    assert running.reply("/other/cancel", {"job_id": "j1"})[0] == 404, "another client's"
    running.post("/stop")
    assert [answer.result(60).json()["error"] for answer in mine] == ["cancelled"] * 3
    [left] = [each for each in ids if each != foreign and not service.status(each).done]
    assert not service.status(foreign).done
    place(service.store, left)
    run_to_end(service.store, f"{left}.0.0")
    assert of_other.result(60).json()["resolved"] is True


_REFUSED: list[tuple[str, Any, int, str]] = [
    ("/process", {}, 422, "instance"),
    ("/process", {**BODY, "extra": 1}, 422, "extra"),
    ("/process", {**BODY, "instance": []}, 422, "instance"),
    ("/process", {**BODY, "job_id": ""}, 422, "job_id"),
    ("/process", {**BODY, "instance": {**INSTANCE, "data_source": 7}}, 422, "data_source"),
    ("/process", {**BODY, "instance": {**INSTANCE, "data_source": "osworld"}}, 400, "needs a desktop"),
    ("/process", {**BODY, "instance": {**INSTANCE, "data_source": "nope"}}, 400, "not registered"),
    ("/process", {**BODY, "instance": {**INSTANCE, "seconds": "x"}}, 422, "seconds"),
    ("/process", {**BODY, "instance": {**INSTANCE, "data_source": "deepscaler", "prompt": "2+2"}}, 422, "gold answer"),
    ("/process", {**BODY, "instance": {"trajectory_id": 1}}, 422, "instance_id"),
    ("/process", {**BODY, "sampling_params": {"max_iteration": 3}}, 422, "max_iteration"),
    ("/process", {**BODY, "sampling_params": {"temperature": 9}}, 422, "temperature"),
    ("/process", {**BODY, "sampling_params": {"enable_vision": True}}, 422, "enable_vision"),
    ("/process", {**BODY, "sampling_params": {"native_tool_calling": False}}, 422, "native_tool_calling"),
    ("/process", {**BODY, "sampling_params": {"api_key": "a b"}}, 422, "engine_key"),
    ("/cancel", {}, 422, "job_id"),
    ("/cancel", {"job_id": 1}, 422, "job_id"),
    ("/add_llm_server", {"address": "nowhere"}, 422, "address"),
    ("/add_llm_server", {"address": "http://127.0.0.1:9/\r\nX: y"}, 422, "control characters"),
    ("/add_llm_server", {"address": "http://169.254.169.254/latest"}, 422, "link-local address"),
    ("/add_llm_server", {}, 422, "address"),
    ("/a.b/start", None, 404, "name in the path"),
    ("/nope", None, 404, "there is no"),
]


def test_invalid_requests_are_refused_in_protocol_form_without_effect(running: WireClient, service: LocalFarm) -> None:
    for path, body, status, words in _REFUSED:
        answer = running.post(path, body)
        assert (answer.status_code, list(answer.json())) == (status, ["detail"]), (path, body, answer.text)
        assert words in answer.text, (path, body)
        assert isinstance(answer.json()["detail"], list if status == 422 else str)
    assert service.recent() == []


@pytest.mark.parametrize("strict", [False, True])
def test_timed_out_job_and_unknown_id_are_refused(
    service: LocalFarm, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.api.prorl.prorl_verbs._MARGIN_S", 0.0)
    config = replace(ApiConfig.of(settings(), strict), prorl_timeout_s=0.1)
    with served(service, speak=("prorl",), config=config) as url, ThreadPoolExecutor(1) as pool:
        client = WireClient(f"{url}/prorl", pool)
        client.post("/add_llm_server", {"address": SERVER})
        client.post("/start")
        late = client.post("/process", BODY)
        unknown = client.post("/cancel", {"job_id": "x"})
        assert (late.status_code, unknown.status_code) == ((500, 200) if strict else (504, 404))
        assert "timed out" in late.json()["detail"]
        [batch_id] = service.recent()
        assert not service.status(batch_id).done, "it goes on, for a client that asks again"


def test_two_api_processes_share_one_session(service: LocalFarm) -> None:
    with (
        served(service, speak=("prorl",)) as one,
        served(service, speak=("prorl",)) as two,
        ThreadPoolExecutor(4) as pool,
    ):
        first, second = (WireClient(f"{url}/prorl", pool) for url in (one, two))
        first.post("/add_llm_server", {"address": SERVER})
        starts = [pool.submit(each.post, "/start") for each in (first, second)]
        assert sorted(start.result(60).status_code for start in starts) == [200, 400]
        answer = process(first, BODY)
        [batch_id] = submitted(service)
        assert status(second)[1]["pending_jobs"] == 1
        place(service.store, batch_id)
        run_to_end(service.store, f"{batch_id}.0.0")
        assert answer.result(60).json()["rollout_id"] == f"{batch_id}.0.0"
        assert second.reply("/stop")[0] == 200
        assert first.reply("/process", BODY)[0] == 503


def test_samples_of_an_instance_are_spread_evenly_over_servers(running: WireClient, service: LocalFarm) -> None:
    running.post("/add_llm_server", {"address": "http://127.0.0.1:8/v1"})
    bodies = [{**BODY, "instance": {**INSTANCE, "trajectory_id": index}} for index in range(4)]
    answers = [process(running, body) for body in bodies]
    ids = submitted(service, 4)
    urls = [service.store.read(partial(batches.request_of, batch_id=each)) for each in ids]
    engines = [url["engines"][0]["engine_url"] for url in urls]
    assert sorted(engines) == ["http://127.0.0.1:8/v1"] * 2 + ["http://127.0.0.1:9/v1"] * 2
    running.post("/stop")
    # 503 is for one that was stopped before its submit was answered
    assert {answer.result(60).status_code for answer in answers} <= {200, 503}
