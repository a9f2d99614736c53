"""Addresses, keys and refusals of all protocols of other systems: a protocol is found, and refuses in its own form."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner
from starlette.types import ASGIApp, Receive, Scope, Send

from farm.api.protocols import ProtocolSwitch
from farm.cli.main import main
from farm.client.local import LocalFarm
from farm.notifications import Signals
from farm.store.database import Store
from tests.services.api import KEY, served

PASSWORD = base64.b64encode(f"farm:{KEY}".encode()).decode()


@pytest.fixture
def url(sqlite_store: Store) -> Iterator[str]:
    with served(LocalFarm(sqlite_store, Signals(""), 1000), speak=("prorl",)) as url:
        yield url


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", f"Bearer {KEY}")],
        [("authorization", f"bearer {KEY}")],
        [("x-api-key", KEY)],
        [("authorization", f"Basic {PASSWORD}")],
    ],
)
def test_key_is_accepted_in_each_header_form(url: str, headers: list[tuple[str, str]]) -> None:
    assert httpx2.get(f"{url}/v1/nodes", headers=headers).status_code == 200
    assert httpx2.get(f"{url}/prorl/status", headers=headers).status_code == 503


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("x-api-key", "")],
        [("x-api-key", f"Bearer {KEY}x")],
        [("authorization", f"Digest {KEY}")],
        [("authorization", "Basic")],
        [("authorization", KEY)],
        [("authorization", "Basic !")],
        [("authorization", f"Basic {base64.b64encode(KEY.encode()).decode()}")],
        [("authorization", f"Basic {PASSWORD}=")],
        [("authorization", f"Bearer {KEY}"), ("x-api-key", KEY)],
        [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer other")],
    ],
)
def test_missing_key_is_refused_in_the_form_of_the_protocol(url: str, headers: list[tuple[str, str]]) -> None:
    own = httpx2.get(f"{url}/v1/nodes", headers=headers)
    assert (own.status_code, own.json()["error"]["kind"]) == (401, "NotAllowed")
    other = httpx2.get(f"{url}/prorl/status", headers=headers)
    assert (other.status_code, list(other.json())) == (401, ["detail"])


@pytest.mark.parametrize("path", ["/prorl/nothing", "/prorl/healthz", "/prorl", "/prorl/v1/nodes"])
def test_unknown_path_is_refused_in_the_form_of_the_protocol(url: str, path: str) -> None:
    assert httpx2.get(url + path).status_code == 401
    answer = httpx2.get(url + path, headers={"x-api-key": KEY})
    assert (answer.status_code, list(answer.json())) == (404, ["detail"])


def test_only_enabled_protocols_are_served(url: str, sqlite_store: Store) -> None:
    with served(LocalFarm(sqlite_store, Signals(""), 1000)) as silent:
        answer = httpx2.get(f"{silent}/prorl/status", headers={"x-api-key": KEY})
    assert (answer.status_code, answer.json()["error"]["kind"]) == (404, "NotFound")


@pytest.mark.parametrize(
    ("path", "port", "answers"),
    [
        ("/a/x/y", 1, "a:/x/y"),
        ("/a", 1, "a:/"),
        ("/a/", 1, "a:/"),
        ("/ab/x", 1, "own:/ab/x"),
        ("/v1/a", 1, "own:/v1/a"),
        ("/x/y", 2, "b:/x/y"),
        ("/a/x", 2, "b:/a/x"),
        ("/b/x", 1, "b:/x"),
    ],
)
def test_request_is_routed_by_port_or_path(path: str, port: int, answers: str) -> None:
    paths: list[str] = []

    def app(name: str) -> ASGIApp:
        async def note(scope: Scope, receive: Receive, send: Send) -> None:
            paths.append(f"{name}:{scope['path']}")

        return note

    switch = ProtocolSwitch(app("own"), {"a": app("a"), "b": app("b")}, {2: app("b")})
    nothing: Any = None
    asyncio.run(switch({"type": "http", "path": path, "server": ("h", port)}, nothing, nothing))
    assert paths == [answers]


@pytest.mark.parametrize(
    ("speak", "complaint"),
    [
        ("prorl=", "must be a number from 1 to 65535"),
        ("prorl=0", "must be a number from 1 to 65535"),
        ("prorl=65536", "must be a number from 1 to 65535"),
        ("prorl=x", "must be a number from 1 to 65535"),
        ("klingon", "'klingon'"),
        ("", "''"),
        ("prorl,", "''"),
    ],
)
def test_invalid_speak_option_is_refused(speak: str, complaint: str) -> None:
    result = CliRunner().invoke(main, ["api", "--port", "0", "--speak", speak])
    assert result.exit_code != 0
    assert complaint in result.output
