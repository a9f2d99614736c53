"""E2B's protocol on a store without a node: invalid requests, and sandboxes that do not run."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from farm.callers import Scope
from farm.client.local import LocalFarm
from farm.notifications import Signals
from farm.records.lending.borrowed_sandbox import BorrowRequest
from farm.store.database import Store
from tests.doubles.connect_client import AgentClient, StreamFailed, framed, started
from tests.services.api import KEY, served

UNARY = (
    *("process.Process/List", "process.Process/Update", "process.Process/SendInput", "process.Process/SendSignal"),
    *("process.Process/CloseStdin", "filesystem.Filesystem/Stat", "filesystem.Filesystem/ListDir"),
    *("filesystem.Filesystem/MakeDir", "filesystem.Filesystem/Move", "filesystem.Filesystem/Remove"),
)
STREAMS = ("process.Process/Start", "process.Process/Connect")
PROCESS = {"process": {"pid": 1}}
PATH = {"path": "/x"}


@pytest.fixture
def service(sqlite_store: Store) -> LocalFarm:
    return LocalFarm(sqlite_store, Signals(""), 1000)


@pytest.fixture
def url(service: LocalFarm) -> Iterator[str]:
    with served(service, speak=("e2b",)) as url:
        yield f"{url}/e2b"


@pytest.fixture
def rest(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, headers={"x-api-key": KEY}, timeout=60.0) as client:
        yield client


_NO_SANDBOXES: list[tuple[Any, str]] = [
    ([], "request"),
    ({"klingon": 1}, "klingon"),
    ({"templateID": ""}, "templateID"),
    ({"templateID": 1}, "templateID"),
    ({"timeout": -1}, "timeout"),
    ({"timeout": 10**6}, "timeout"),
    ({"timeout": "soon"}, "timeout"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {str(n): "" for n in range(65)}}, "metadata"),
    ({"envVars": {"A": None}}, "envVars"),
    ({"autoPause": True}, "autoPause"),
    ({"autoResume": {"enabled": True}}, "autoResume"),
    ({"network": {"denyOut": ["0.0.0.0/0"]}}, "network"),
    ({"mcp": {"github": {}}}, "mcp"),
    ({"iam": {"tokens": {}}}, "iam"),
    ({"volumeMounts": [{"name": "v", "path": "/v"}]}, "volumeMounts"),
]


def test_invalid_sandbox_is_refused_by_its_field(rest: httpx2.Client, service: LocalFarm) -> None:
    for body, field in _NO_SANDBOXES:
        for path in ("/sandboxes", "/v2/sandboxes"):
            answer = rest.post(path, json=body)
            error = answer.json()
            assert (answer.status_code, error["code"], set(error)) == (400, 400, {"code", "message"}), body
            assert error["message"].startswith(field), (body, error)
    assert not service.sandboxes.list(), "none is left"


def test_invalid_message_is_refused_by_its_code(url: str) -> None:
    agent = AgentClient(url, "none")
    message: Any
    for verb in UNARY:
        for body in (b"{", b"[]", b"1", b'{"process": 1, "path": 1, "source": 1}', b"\xff"):
            answer = httpx2.post(
                f"{url}/{verb}",
                content=body,
                headers={"x-api-key": KEY, "e2b-sandbox-id": "none", "content-type": "application/json"},
            )
            if verb.endswith("List") and body.startswith(b'{"'):
                continue
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument"), (verb, body)
    for message in ({"process": {}}, {"process": {"pid": 0}}, {"process": {"pid": "x"}}, {"process": {"tag": ""}}):
        assert agent.refusal("process.Process/CloseStdin", message) == (400, "invalid_argument"), message
    for message in ({**PROCESS, "signal": "SIGNAL_SIGHUP"}, PROCESS, {**PROCESS, "signal": 1}):
        assert agent.refusal("process.Process/SendSignal", message) == (400, "invalid_argument"), message
    for data in ("é", "a", 1, "%%%%"):
        message = {**PROCESS, "input": {"stdin": data}}
        assert agent.refusal("process.Process/SendInput", message) == (400, "invalid_argument"), data
    for path in ("", "x" * 4097, "a\0b", "\ud800"):
        assert agent.refusal("filesystem.Filesystem/Stat", {"path": path}) == (400, "invalid_argument"), path
    for verb in ("CreateWatcher", "GetWatcherEvents", "RemoveWatcher"):
        assert agent.refusal(f"filesystem.Filesystem/{verb}", PATH) == (501, "unimplemented")


def test_invalid_stream_is_refused_in_its_last_message(url: str) -> None:
    def end_of(verb: str, content: bytes, content_type: str = "application/connect+json", **more: str) -> str:
        headers = {"x-api-key": KEY, "e2b-sandbox-id": "none", "content-type": content_type, **more}
        answer = httpx2.post(f"{url}/{verb}", content=content, headers=headers)
        assert answer.status_code == 200
        assert (answer.content[0], answer.headers["content-type"]) == (2, "application/connect+json")
        return str(json.loads(answer.content[5:])["error"]["code"])

    for verb in STREAMS:
        for content in (b"", b"\0\0", framed([]), framed({"process": 1}), framed({})[:-1], b"\0\0\0\0\1{"):
            assert end_of(verb, content) == "invalid_argument", (verb, content)
        assert end_of(verb, framed({}), "application/json") == "unimplemented"
        assert end_of(verb, framed({}, flags=1)) == "unimplemented"
        assert end_of(verb, b"\0\xff\xff\xff\xff") == "resource_exhausted"
    for values in ({"pty": {"size": {"rows": 0, "cols": 1}}}, {"tag": "x" * 201}, {"stdin": "perhaps"}):
        assert end_of(STREAMS[0], framed(started("true", **values))) == "invalid_argument", values
    for given in ("soon", "0", "-1", "9" * 11):
        timeout = {"connect-timeout-ms": given}
        assert end_of(STREAMS[0], framed(started("true")), **timeout) == "invalid_argument", given
    data = framed({"data": {"input": {"stdin": "eA=="}}})
    assert end_of("process.Process/StreamInput", data) == "invalid_argument", "it names no process"
    assert end_of("filesystem.Filesystem/WatchDir", framed(PATH)) == "unimplemented"


def test_missing_sandbox_is_reported_in_the_form_of_e2b(url: str, rest: httpx2.Client, service: LocalFarm) -> None:
    ended = service.sandboxes.begin(BorrowRequest()).sandbox_id
    service.sandboxes.stop(ended)
    message: Any
    for sandbox_id in ("none", ended):
        agent = AgentClient(url, sandbox_id)
        for verb in UNARY:
            message = {**PROCESS, **PATH, "source": "/x", "destination": "/y", "signal": "SIGNAL_SIGKILL"}
            size = {"pty": {"size": {"rows": 1, "cols": 1}}}
            answer = agent.ask(verb, {**message, **size})
            assert (answer.status_code, answer.json()["code"]) == (502, 502), verb
            assert "was not found" in answer.json()["message"], verb
        for verb, message in ((STREAMS[0], started("true")), (STREAMS[1], PROCESS)):
            with pytest.raises(StreamFailed, match="was not found"), agent.stream(verb, message):
                pass
        for method, values in (("GET", {}), ("POST", {"files": {"file": b"x"}})):
            answer = agent.file(method, params=PATH, **values)
            assert (answer.status_code, "was not found" in answer.json()["message"]) == (502, True)
        assert agent.health() == 502
        for method, path, body in (
            ("GET", "", None),
            ("DELETE", "", None),
            ("POST", "/timeout", {"timeout": 60}),
            ("POST", "/refreshes", {"duration": 60}),
            ("POST", "/connect", {"timeout": 60}),
            ("POST", "/resume", {}),
        ):
            answer = rest.request(method, f"/sandboxes/{sandbox_id}{path}", json=body)
            assert (answer.status_code, answer.json()["code"]) == (404, 404), (method, path)
    assert httpx2.get(f"{url}/health", headers={"x-api-key": KEY}).status_code == 400, "no sandbox is named"


def test_invalid_file_requests_are_refused_with_e2b_status(url: str) -> None:
    agent = AgentClient(url, "none")
    values: Any
    for values, status in (
        ({}, 400),
        ({"params": {"path": ""}}, 400),
        ({"params": {**PATH, "signature": "v1_x"}}, 401),
        ({"params": {**PATH, "username": "klingon"}}, 401),
    ):
        assert agent.file("GET", **values).status_code == status, values
    octets = {"content-type": "application/octet-stream"}
    for values, status in (
        ({"content": b"x", "headers": octets}, 400),
        ({"params": PATH, "content": b"x", "headers": {**octets, "content-encoding": "br"}}, 400),
        ({"params": PATH, "content": b"no gzip", "headers": {**octets, "content-encoding": "gzip"}}, 400),
        ({"params": PATH, "content": b"x", "headers": {"content-type": "text/plain"}}, 400),
        ({"params": PATH, "files": {"other": b"x"}}, 400),
        ({"params": PATH, "files": [("file", b"x"), ("file", b"y")]}, 400),
        ({"files": {"file": ("", b"x")}}, 400),
    ):
        answer = agent.file("POST", **values)
        assert (answer.status_code, "message" in answer.json()) == (status, True), (values, answer.text)


def test_key_is_accepted_in_every_header_of_its_clients(url: str, service: LocalFarm) -> None:
    begun = service.sandboxes.begin(BorrowRequest()).sandbox_id
    user = base64.b64encode(b"root:").decode()
    for headers, status in (
        ({"x-api-key": KEY}, 200),
        ({"x-access-token": KEY}, 200),
        ({"x-access-token": KEY, "authorization": f"Basic {user}"}, 200),
        ({"authorization": f"Basic {user}"}, 401),
        ({"x-access-token": "wrong"}, 401),
        ({"x-access-token": KEY, "x-api-key": KEY}, 401),
        ({}, 401),
    ):
        answer = httpx2.get(f"{url}/sandboxes/{begun}", headers=headers)
        assert answer.status_code == status, headers
        assert status == 200 or set(answer.json()) == {"code", "message"}


def test_key_may_use_only_its_own_sandboxes(url: str, service: LocalFarm) -> None:
    other = service.sandboxes.begin(BorrowRequest(labels={"a": "b"})).sandbox_id
    mine = service.access.add_key("mine", [Scope.READ, Scope.SUBMIT])
    reader = service.access.add_key("reader", [Scope.READ])
    own = {"x-api-key": mine}
    assert httpx2.get(f"{url}/v2/sandboxes", headers=own).json() == []
    assert len(httpx2.get(f"{url}/v2/sandboxes", headers={"x-api-key": KEY}).json()) == 1
    assert httpx2.get(f"{url}/sandboxes/{other}", headers=own).status_code == 403
    assert httpx2.delete(f"{url}/sandboxes/{other}", headers=own).status_code == 403
    agent = AgentClient(url, other, **{"x-access-token": mine})
    assert agent.ask("process.Process/List", {}).status_code in (403, 429)
    assert httpx2.post(f"{url}/sandboxes", json={}, headers={"x-api-key": reader}).status_code == 403
    assert service.sandboxes.get(other).ended is False


def test_unsupported_endpoints_are_refused_as_unimplemented(rest: httpx2.Client) -> None:
    for method, path in (
        ("POST", "/sandboxes/x/pause"),
        ("POST", "/sandboxes/x/fork"),
        ("POST", "/sandboxes/x/snapshots"),
        ("PUT", "/sandboxes/x/network"),
        ("GET", "/sandboxes/x/metrics"),
        ("GET", "/v2/templates"),
        ("GET", "/volumes"),
    ):
        answer = rest.request(method, path)
        assert (answer.status_code, answer.json()["code"]) == (501, 501), path
    missing = rest.get("/klingon")
    assert (missing.status_code, missing.json()["code"]) == (404, 404)


def test_pages_of_sandboxes_are_filtered_by_labels(rest: httpx2.Client, service: LocalFarm) -> None:
    ids = [service.sandboxes.begin(BorrowRequest(labels={"n": str(n), "odd": str(n % 2)})).sandbox_id for n in range(5)]
    seen: list[str] = []
    token = ""
    while True:
        query = {"limit": "2", "metadata": "odd=0", **({"nextToken": token} if token else {})}
        answer = rest.get("/v2/sandboxes", params=query)
        seen += [each["sandboxID"] for each in answer.json()]
        if not (token := answer.headers.get("x-next-token", "")):
            break
    assert seen == [ids[4], ids[2], ids[0]]
    assert rest.get("/v2/sandboxes", params={"state": "paused"}).json() == []
    assert len(rest.get("/v2/sandboxes", params={"state": "running,paused"}).json()) == 5
    for query in ({"limit": "0"}, {"metadata": "odd"}, {"order": "asc"}, {"klingon": "1"}, {"limit": "x"}):
        assert rest.get("/v2/sandboxes", params=query).status_code == 400, query
    assert rest.get("/v2/sandboxes", params={"nextToken": "none"}).status_code == 404
