"""VeRL-Tool's tool server on a store without a node: refusals leave nothing, errors show nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from farm.api.endpoints import ApiConfig
from farm.client.local import LocalFarm
from farm.notifications import Signals
from farm.records.lending.borrowed_sandbox import BorrowedSandbox
from farm.settings import settings
from farm.store import borrowed_sandboxes
from farm.store.database import Store
from tests.services.api import served
from tests.services.wire_clients import WireClient

LS = "<bash>ls</bash>"


@pytest.fixture
def service(sqlite_store: Store) -> LocalFarm:
    return LocalFarm(sqlite_store, Signals(""), 1_000_000)


@pytest.fixture
def client(service: LocalFarm) -> Iterator[WireClient]:
    config = replace(ApiConfig.of(settings()), verl_tool_wait_s=0.2)
    with served(service, speak=("verl-tool",), config=config) as url, ThreadPoolExecutor(2) as pool:
        yield WireClient(f"{url}/verl-tool", pool)


def observed(client: WireClient, body: dict[str, Any]) -> list[tuple[Any, bool, bool]]:
    status, answer = client.reply("/get_observation", body)
    assert status == 200, answer
    assert min(answer["processing_time_ms"], answer["queue_time_ms"]) >= 0
    return list(zip(answer["observations"], answer["dones"], answer["valids"], strict=True))


def one(client: WireClient, action: str, **more: list[Any]) -> tuple[Any, bool, bool]:
    [result] = observed(client, {"trajectory_ids": ["t"], "actions": [action], **more})
    return result


def sandboxes(service: LocalFarm) -> list[BorrowedSandbox]:
    return list(service.sandboxes.list(ended=True))


ONE = {"trajectory_ids": ["t"], "actions": [LS]}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "trajectory_ids"),
        ({"trajectory_ids": [], "actions": []}, "trajectory_ids"),
        ({"trajectory_ids": ["t", "u"], "actions": [LS]}, ""),
        ({**ONE, "extra_fields": []}, ""),
        ({**ONE, "finish": [False, True]}, ""),
        ({**ONE, "is_last_step": []}, ""),
        ({"trajectory_ids": [1], "actions": [LS]}, "trajectory_ids[0]"),
        ({"trajectory_ids": [""], "actions": [LS]}, "trajectory_ids[0]"),
        ({"trajectory_ids": ["x" * 181], "actions": [LS]}, "trajectory_ids[0]"),
        ({"trajectory_ids": ["t\0"], "actions": [LS]}, "trajectory_ids[0]"),
        ({"trajectory_ids": ["t"], "actions": [None]}, "actions[0]"),
        ({"trajectory_ids": "t", "actions": LS}, "trajectory_ids"),
        ({**ONE, "extra_fields": [None]}, "extra_fields[0]"),
        ({**ONE, "extra_fields": [{"farm_sandbox": 1}]}, "extra_fields[0].farm_sandbox"),
        ({**ONE, "extra_fields": [{"farm_sandbox": {"imge": "host"}}]}, "extra_fields[0].farm_sandbox.imge"),
        ({**ONE, "extra_fields": [{"farm_sandbox": {"network": True}}]}, "spec"),
        ({**ONE, "extra_fields": [{"farm_sandbox": {"kind": "klingon"}}]}, ""),
        (
            {
                "trajectory_ids": ["t", "u"],
                "actions": [LS, LS],
                "extra_fields": [{}, {"farm_sandbox": {"kind": "klingon"}}],
            },
            "",
        ),
        ([], ""),
        ("text", ""),
    ],
)
def test_invalid_body_is_refused_by_its_field_without_effect(
    client: WireClient, service: LocalFarm, body: Any, field: str
) -> None:
    answer = client._http.post("/get_observation", json=body)
    assert answer.status_code == 422, answer.text
    [fault, *_] = answer.json()["detail"]
    assert fault["loc"][0] == "body"
    assert ".".join(fault["loc"][1:]).startswith(field)
    assert sandboxes(service) == []


def test_invalid_json_and_missing_key_are_refused(client: WireClient, service: LocalFarm) -> None:
    headers = {"content-type": "application/json"}
    for content in (b"{", b"\xff", b"[" * 100_000):
        answer = client._http.post("/get_observation", content=content, headers=headers)
        assert (answer.status_code, list(answer.json())) == (422, ["detail"])
    assert client._http.post("/get_observation", content=b"x").status_code == 415
    assert client._http.post("/get_observation", json=ONE, headers={"x-api-key": "no"}).status_code == 401
    assert client.get("/get_observation").json() == {"detail": "there is no GET /get_observation"}
    assert sandboxes(service) == []


def test_actions_without_a_tool_need_no_sandbox(client: WireClient, service: LocalFarm) -> None:
    shown, done, valid = one(client, "I think.", more=["ignored"])
    assert (shown["obs"], done, valid) == ("", False, False)
    assert "bash" in shown["available_tools"]
    assert one(client, "<answer>4</answer>") == ("", True, False)
    assert one(client, "", finish=[True], is_last_step=[True]) == ("", True, True)
    shown, done, valid = one(client, f"<bash>{'x' * 2_000_000}</bash>")
    assert (shown["obs"], done, valid) == ("", False, False)
    shown, done, valid = one(client, "<bash>\0</bash>")
    assert (shown["obs"], done, valid) == ("", False, False)
    assert sandboxes(service) == []


def test_waiting_sandbox_gives_no_observation_and_finish_ends_it(client: WireClient, service: LocalFarm) -> None:
    for _ in range(2):
        shown, done, valid = one(client, LS)
        assert (shown["obs"], done, valid) == ("", True, False)
        assert "trajectory t: sandbox s-" in shown["error"]
        assert "waiting" in shown["error"]
    assert client.get("/metrics").json()["sandboxes"] == {"waiting": 1, "starting": 0, "running": 0}
    [waiting] = sandboxes(service)
    assert (waiting.name, waiting.ended, waiting.lease_s) == ("verl-tool:t", False, settings().verl_tool_lease_s)
    assert one(client, "", extra_fields=[{"finish": True}]) == ("", True, True)
    [ended] = sandboxes(service)
    assert (ended.ended, ended.finished) == (True, True)
    assert one(client, LS)[2] is False
    assert len(sandboxes(service)) == 2, "a finished id begins anew"


def test_lost_trajectory_is_not_restarted(client: WireClient, service: LocalFarm) -> None:
    one(client, LS)
    [waiting] = sandboxes(service)
    why = "its node was lost"
    service.store.write(lambda connection: borrowed_sandboxes.end(connection, [waiting.sandbox_id], why))
    for _ in range(2):
        shown, done, valid = one(client, LS)
        assert (shown["obs"], done, valid) == ("", True, False)
        assert why in shown["error"]
    assert len(sandboxes(service)) == 1
    assert observed(client, {**ONE, "finish": [True]}) == [("", True, True)]
    one(client, LS)
    assert len(sandboxes(service)) == 2


def test_health_and_metrics_have_the_fields_of_its_server(client: WireClient) -> None:
    health = client.get("/health").json()
    assert (health["status"], health["concurrent_requests"]) == ("healthy", 0)
    assert health["tools"] == ["bash", "python", "search", "finish"]
    names = ("thread_pool_size", "active_tasks", "max_concurrent")
    assert all(isinstance(health[name], int) for name in names)
    assert health["uptime_seconds"] > 0
    metrics = client.get("/metrics").json()
    assert set(metrics["config"]) == {"max_concurrent", "timeout", "hashing_enabled"}
