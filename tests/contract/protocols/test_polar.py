"""Polar's rollout server on a store: a recorded conversation for each endpoint, and refusals without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from farm.client.local import LocalFarm
from farm.notifications import Signals
from farm.observing.observer import Observer
from farm.observing.webhook_sender import WebhookSender
from farm.records.rollout import Stage
from farm.store.database import Store
from tests.contract.store.test_store import claimed, fail, place
from tests.services.api import served
from tests.services.servers.webhook_receiver import receiver
from tests.services.wire_clients import BASH, WireClient, run_two_turns, submitted

ENGINE = "http://127.0.0.1:9/v1"
TASK = {
    "task_id": "t1",
    "instruction": "",
    "num_samples": 2,
    "dispatch_priority": 7,
    "agent": {"harness": "", "settings": {"temperature": 0.5}},
    "builder": {"strategy": "prefix_merging"},
    "evaluator": {"strategy": "noop", "config": {"seconds": 0.0}},
    "metadata": {"step": 3},
}


@pytest.fixture
def service(sqlite_store: Store) -> LocalFarm:
    farm = LocalFarm(sqlite_store, Signals(""), 1_000_000)
    farm.add_engine(ENGINE, "m")
    return farm


@pytest.fixture
def client(service: LocalFarm) -> Iterator[WireClient]:
    with served(service, speak=("polar",)) as url, ThreadPoolExecutor(2) as pool:
        yield WireClient(f"{url}/polar", pool)


def named(task: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {**task, **changed}


def test_task_is_submitted_and_its_results_are_read(client: WireClient, service: LocalFarm) -> None:
    task = named(TASK)
    running = {"task_id": "t1", "status": "running"}
    assert client.reply("/rollout/task/submit", task) == client.reply("/rollout/task/submit", task) == (200, running)
    [batch_id] = submitted(service)
    begun = client.get("/rollout/task/t1").json()
    counts = {"total_sessions": 2, "completed_sessions": 0, "results": [], "result_paths": []}
    assert begun == {**running, **counts}
    assert client.get("/rollout/status").json() == {"running_tasks": 1, "sessions": {"init": 2}}
    place(service.store, batch_id)
    run_two_turns(service.store, batch_id, reward=0.25)
    fail(service.store, claimed(service.store, f"{batch_id}.0.1", Stage.INIT), None)
    ended = client.get("/rollout/task/t1").json()
    assert (ended["status"], ended["completed_sessions"]) == ("completed", 2)
    whole, broken = sorted(ended["results"], key=lambda result: str(result["session_id"]))
    [trace] = whole["trajectory"]["traces"]
    called = [{"id": "1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]
    assert trace == {
        "prompt_ids": [1, 2, 3],
        "response_ids": [4, 5, 6, 7, 8],
        "loss_mask": [1, 1, 0, 0, 1],
        "response_logprobs": [-0.5, -0.5, 0.0, 0.0, -0.5],
        "prompt_messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        "response_messages": [
            {"role": "assistant", "content": None, "tool_calls": called},
            {"role": "tool", "tool_call_id": "1", "content": "out"},
            {"role": "assistant", "content": "done"},
        ],
        "tools": [BASH],
        "finish_reason": "stop",
        "reward": 0.25,
        "metadata": {"policy_version": ""},
    }
    assert (whole["status"], whole["session_id"], whole["error"]) == ("COMPLETED", f"{batch_id}.0.0", None)
    assert whole["timing"]["e2e_ms"] >= 0
    trajectory = broken["trajectory"]
    assert (broken["status"], trajectory["traces"], trajectory["metadata"]["outcome_reward"]) == ("ERROR", [], None)
    assert broken["error"]
    sessions = client.get("/tasks/t1/sessions").json()["sessions"]
    assert [each["status"] for each in sessions] == ["COMPLETED", "ERROR"]
    [line] = client.get("/tasks?status=completed").json()["tasks"]
    assert (line["task_id"], line["mean_reward"], line["total_sessions"]) == ("t1", 0.25, 2)
    assert client.get("/tasks?status=running").json() == {"tasks": []}
    assert client.ask("DELETE", "/rollout/task/t1").json()["status"] == "completed"


def test_per_request_builder_gives_a_trace_per_request(client: WireClient, service: LocalFarm) -> None:
    client.post("/rollout/task/submit", named(TASK, num_samples=1, builder={"strategy": "per_request"}))
    [batch_id] = submitted(service)
    run_two_turns(service.store, batch_id)
    [result] = client.get("/rollout/task/t1").json()["results"]
    traces = result["trajectory"]["traces"]
    assert [(each["prompt_ids"], each["response_ids"], each["loss_mask"]) for each in traces] == [
        ([1, 2, 3], [4, 5], [1, 1]),
        ([1, 2, 3, 4, 5, 6, 7], [8], [1]),
    ]
    assert [each["tools"] for each in traces] == [[BASH], [BASH]]


def test_task_is_cancelled_before_and_after_its_submit(client: WireClient, service: LocalFarm) -> None:
    task = named(TASK)
    assert client.ask("DELETE", "/rollout/task/t1").status_code == 404
    tombstone = client.ask("DELETE", "/rollout/task/t1?register_if_missing=true").json()
    assert (tombstone["status"], tombstone["total_sessions"]) == ("cancelled", 0)
    status, answer = client.reply("/rollout/task/submit", task)
    assert (status, answer) == (409, {"detail": "task t1 was cancelled before submission"})
    assert service.recent() == []
    client.post("/rollout/task/submit", {**task, "task_id": "t2"})
    ended = client.ask("DELETE", "/rollout/task/t2").json()
    assert (ended["status"], [each["status"] for each in ended["results"]]) == ("cancelled", ["ERROR"] * 2)


def test_callback_receives_the_result(client: WireClient, service: LocalFarm) -> None:
    with receiver() as hook:
        client.post("/rollout/task/submit", named(TASK, num_samples=1, callback_url=hook.url))
        [batch_id] = submitted(service)
        run_two_turns(service.store, batch_id)
        Observer(service.store, lambda: True).look()
        WebhookSender(service.store, lambda: True).send()
        assert hook.bodies == [client.get("/rollout/task/t1").json()]


def test_engines_are_paused_and_resumed(client: WireClient, service: LocalFarm) -> None:
    assert client.get("/admin/inference/status").json() == {"paused": False, "inflight": 0}
    assert client.reply("/admin/inference/resume") == (200, {"paused": False, "inflight": 0})
    status, answer = client.reply("/admin/inference/pause?timeout_seconds=0.01")
    assert (status, list(answer)) in [(504, ["detail"]), (200, ["paused", "inflight"])]
    assert client.get("/admin/inference/status").json()["paused"] is True
    assert client.reply("/admin/inference/resume")[1]["paused"] is False


_REFUSED: list[tuple[str, Any, int, str]] = [
    ("/rollout/task/submit", {}, 422, "task_id"),
    ("/rollout/task/submit", [], 422, "valid dictionary"),
    ("/rollout/task/submit", named(TASK, nope=1), 422, "nope"),
    ("/rollout/task/submit", named(TASK, num_samples=0), 422, "num_samples"),
    ("/rollout/task/submit", named(TASK, runtime={"image": "x"}), 422, "runtime"),
    ("/rollout/task/submit", named(TASK, early_stop_min_usable_sessions=1), 422, "early_stop"),
    ("/rollout/task/submit", named(TASK, callback_url="file:///etc/passwd"), 422, "callback_url"),
    ("/rollout/task/submit", named(TASK, builder={"strategy": "router_policy"}), 422, "builder"),
    ("/rollout/task/submit", named(TASK, evaluator=None), 422, "evaluator"),
    ("/rollout/task/submit", named(TASK, evaluator={"strategy": "session_completed"}), 400, "session_completed"),
    ("/rollout/task/submit", named(TASK, evaluator={"strategy": "noop", "config": {"x": 1}}), 422, "x"),
    ("/rollout/task/submit", named(TASK, instruction="do it"), 422, "instruction"),
    ("/rollout/task/submit", named(TASK, agent={"harness": "claude_code"}), 422, "harness"),
    ("/rollout/task/submit", named(TASK, agent={"settings": {"top_z": 1}}), 422, "top_z"),
    ("/rollout/task/submit", named(TASK, metadata={"agent_timeout": -1}), 422, "agent_timeout"),
    ("/admin/inference/pause?timeout_seconds=x", None, 422, "timeout_seconds"),
    ("/nodes/register", {}, 404, "there is no"),
]


def test_invalid_requests_are_refused_in_protocol_form_without_effect(client: WireClient, service: LocalFarm) -> None:
    for path, body, status, words in _REFUSED:
        answer = client.post(path, body)
        assert (answer.status_code, list(answer.json())) == (status, ["detail"]), (path, body, answer.text)
        assert words in answer.text, (path, body, answer.text)
    missing = client.get("/rollout/task/none")
    assert (missing.status_code, missing.json()) == (404, {"detail": "Task not found"})
    assert client.get("/tasks/none/sessions").status_code == 404
    assert service.recent() == []


def test_task_id_of_a_different_request_is_refused(client: WireClient, service: LocalFarm) -> None:
    client.post("/rollout/task/submit", named(TASK))
    status, answer = client.reply("/rollout/task/submit", named(TASK, num_samples=1))
    assert (status, len(service.recent())) == (409, 1)
    assert "task t1 belongs to a different request" in answer["detail"]
    service.remove_engine(ENGINE)
    assert client.reply("/rollout/task/submit", named(TASK, task_id="t2"))[0] == 503
