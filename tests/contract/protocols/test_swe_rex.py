"""SWE-ReX's server on a store without a node: invalid requests, and sandboxes that do not run."""

from __future__ import annotations

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
from tests.services.api import KEY, served

VERBS = ("create_session", "run_in_session", "close_session", "execute", "read_file", "write_file")
BASH = {"command": "true", "action_type": "bash"}
INTERRUPT = {"action_type": "bash_interrupt"}


@pytest.fixture
def service(sqlite_store: Store) -> LocalFarm:
    return LocalFarm(sqlite_store, Signals(""), 1000)


@pytest.fixture
def client(service: LocalFarm) -> Iterator[httpx2.Client]:
    with (
        served(service, speak=("swe-rex",)) as url,
        httpx2.Client(base_url=f"{url}/swe-rex", headers={"x-api-key": KEY}, timeout=60.0) as client,
    ):
        yield client


_NO_BODIES: list[tuple[str, Any, str]] = [
    *((verb, [], "body") for verb in VERBS),
    *((verb, {"klingon": 1}, "klingon") for verb in VERBS),
    *((verb, None, "body") for verb in VERBS),
    ("create_session", {"session": ""}, "session"),
    ("create_session", {"session": "x" * 201}, "session"),
    ("create_session", {"session": "\0"}, "session"),
    ("create_session", {"session_type": "zsh"}, "session_type"),
    ("create_session", {"startup_source": "~/.bashrc"}, "startup_source"),
    ("create_session", {"startup_timeout": -1}, "startup_timeout"),
    ("run_in_session", {**BASH, "timeout": float("nan")}, "timeout"),
    ("run_in_session", {**BASH, "timeout": "soon"}, "timeout"),
    ("run_in_session", {**BASH, "check": "maybe"}, "check"),
    ("run_in_session", {**BASH, "expect": ""}, "expect"),
    ("run_in_session", {**BASH, "expect": [""]}, "expect[0]"),
    ("run_in_session", {**BASH, "expect": ["x"] * 100}, "expect"),
    ("run_in_session", {**BASH, "action_type": "zsh"}, "action_type"),
    ("run_in_session", {"command": ["true"]}, "command"),
    ("run_in_session", {"command": "a\0b"}, "command"),
    ("run_in_session", {"command": "\ud800"}, "command"),
    ("run_in_session", {**INTERRUPT, "n_retry": 10**6}, "n_retry"),
    ("run_in_session", {**INTERRUPT, "command": "x"}, "command"),
    ("execute", {"command": []}, "command"),
    ("execute", {"command": 1}, "command"),
    ("execute", {"command": "x" * 2_000_001}, "command"),
    ("execute", {"command": "true", "env": {"A": 1}}, "env.A"),
    ("execute", {"command": "true", "timeout": -0.1}, "timeout"),
    ("read_file", {"path": ""}, "path"),
    ("read_file", {"path": "/x" * 4096}, "path"),
    ("write_file", {"path": "/x"}, "content"),
    ("write_file", {"path": "/x", "content": None}, "content"),
]


def test_invalid_body_is_refused_by_its_field(client: httpx2.Client) -> None:
    for verb, body, field in _NO_BODIES:
        content = b"{" if body is None else json.dumps(body).encode()
        answer = client.post(f"/none/{verb}", content=content, headers={"content-type": "application/json"})
        assert (answer.status_code, list(answer.json())) == (422, ["detail"]), (verb, body)
        places = [".".join(fault["loc"]).removeprefix("body.") for fault in answer.json()["detail"]]
        assert any(place.startswith(field) for place in places), (verb, body, places)


_NO_FORMS: list[tuple[bytes, str, str]] = [
    (b"", "multipart/form-data; boundary=b", "body"),
    (b"{}", "application/json", "body"),
    (b"x", "multipart/form-data", "body"),
    (b"rubbish", "multipart/form-data; boundary=b", "body"),
    (b"--b\r\n", "multipart/form-data; boundary=b", "body"),
    (b"--b\r\nno headers\r\n--b--", "multipart/form-data; boundary=b", "body"),
    (b"--b--", "multipart/form-data; boundary=b", "file"),
    (
        b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\nx\r\n--b--',
        "multipart/form-data; boundary=b",
        "target_path",
    ),
]


def test_invalid_form_is_refused_by_its_field(client: httpx2.Client) -> None:
    for content, content_type, field in _NO_FORMS:
        answer = client.post("/none/upload", content=content, headers={"content-type": content_type})
        assert (answer.status_code, answer.json()["detail"][0]["loc"][-1]) == (422, field), content


_NO_UPLOADS: list[tuple[dict[str, Any], bytes, int, str]] = [
    ({"target_path": "/x", "unzip": "perhaps"}, b"x", 422, "must be true or false"),
    ({"target_path": b"\xff"}, b"x", 422, "UTF-8"),
    ({"target_path": "/x", "unzip": "true"}, b"PK no zip", 511, "zipfile.BadZipFile"),
    ({"target_path": "/x"}, b"x", 511, "there is no"),
    ({"target_path": "/x" * 4096}, b"x", 511, "path"),
]


def test_invalid_upload_is_refused(client: httpx2.Client) -> None:
    for fields, data, status, complaint in _NO_UPLOADS:
        answer = client.post("/none/upload", data=fields, files={"file": data})
        shape = "detail" if status == 422 else "swerexception"
        assert (answer.status_code, list(answer.json())) == (status, [shape]), fields
        assert complaint in answer.text, fields


def test_missing_sandbox_is_reported_as_a_swerex_exception(client: httpx2.Client) -> None:
    assert client.get("/").json() == {"message": "hello world"}
    missing = client.get("/none/is_alive")
    assert (missing.status_code, list(missing.json())) == (404, ["detail"])
    for verb, body in (
        ("create_session", {}),
        ("run_in_session", BASH),
        ("run_in_session", INTERRUPT),
        ("close_session", {}),
        ("execute", {"command": "true"}),
        ("read_file", {"path": "/x"}),
        ("write_file", {"path": "/x", "content": ""}),
        ("close", None),
    ):
        answer = client.post(f"/none/{verb}", json=body) if body is not None else client.post(f"/none/{verb}")
        about = answer.json()["swerexception"]
        assert (answer.status_code, about["class_path"]) == (511, "swerex.exceptions.SwerexException")
        assert "none" in about["message"]
        assert (about["traceback"], about["extra_info"]) == ("", {})


def test_invalid_paths_methods_and_keys_are_refused_with_detail(client: httpx2.Client) -> None:
    assert client.get("/x/y/z").status_code == 404
    assert client.get("/none/execute").status_code == 405
    for method, path in [("GET", "/is_alive"), *(("POST", f"/none/{verb}") for verb in (*VERBS, "upload", "close"))]:
        answer = client.request(method, path, headers={"x-api-key": "another"})
        assert (answer.status_code, list(answer.json())) == (401, ["detail"])
    plain = client.post("/none/execute", content=b'{"command": "true"}', headers={"content-type": "text/plain"})
    assert (plain.status_code, list(plain.json())) == (415, ["detail"])


def test_sandbox_that_waits_or_has_ended_is_not_alive(client: httpx2.Client, service: LocalFarm) -> None:
    waiting = service.sandboxes.begin(BorrowRequest(name="mine", lease_s=5))
    alive = client.get("/mine/is_alive").json()
    assert alive == {"is_alive": False, "message": f"sandbox {waiting.sandbox_id} is waiting"}
    assert client.post("/mine/close").json() == client.post("/mine/close").json() == {}
    assert service.sandboxes.get("mine").ended
    ended = client.get("/mine/is_alive").json()
    assert (ended["is_alive"], "was stopped" in ended["message"]) == (False, True)
    late = client.post("/mine/run_in_session", json=BASH)
    assert (late.status_code, "has ended" in late.json()["swerexception"]["message"]) == (511, True)


def test_key_without_permission_is_refused(client: httpx2.Client, service: LocalFarm) -> None:
    service.sandboxes.begin(BorrowRequest(name="mine"))
    reader = service.access.add_key("reader", [Scope.READ])
    other = service.access.add_key("other", [Scope.SUBMIT])
    for key, name in ((reader, "reader"), (other, "other")):
        for method, path, body in (("GET", "/mine/is_alive", None), ("POST", "/mine/execute", {"command": "true"})):
            answer = client.request(method, path, json=body, headers={"x-api-key": key})
            assert (answer.status_code, list(answer.json())) == (403, ["detail"]), name
