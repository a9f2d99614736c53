"""Requests of the vendors' own types, some of their values wrong: answered, or refused with an error of the API."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farm.records.request import AgentRequests
from tests.services.soak import repeats
from tests.unit.workers.policy.gateway.request_strategies import REQUESTS, Body
from tests.unit.workers.policy.gateway.serving import Playing, Served, served, thinking
from workers.plugins.interfaces import Completion
from workers.testing import ScriptedModel, answering, calling

CHAT, RESPONSES, MESSAGES, GOOGLE = REQUESTS
PLAIN: dict[str, Body] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    RESPONSES: {"input": "hello"},
    MESSAGES: {"messages": [{"role": "user", "content": "hello"}]},
    GOOGLE: {"contents": "hello"},
}
N_REQUESTS = repeats(40, 1500)

each_api = pytest.mark.parametrize("path", REQUESTS)

pytestmark = pytest.mark.soak


class Gateway:
    """One gateway for all requests of a test, in an event loop that runs between them."""

    def __init__(self, requests: AgentRequests) -> None:
        self._requests = requests
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self.n_answered = 0
        self._policy = Playing(answer=lambda _: self._answer())
        self.served: Served = self._runner.run(self._open())

    async def _open(self) -> Served:
        helper = ScriptedModel("a title")
        most = 10**9
        context = served(
            self._policy, models={"helper": helper}, requests=self._requests, max_turns=most, max_tokens=most
        )
        return await self._stack.enter_async_context(context)

    def _answer(self) -> Completion:
        self.n_answered += 1
        self._policy.asked.clear()
        if self.n_answered % 3:
            return answering("yes")
        return thinking("hm", calling(("look", {"a": 1}), ("look", "{no json"), content="I look."))

    def post(self, path: str, body: Body) -> tuple[int, str]:
        # the standard library's JSON writes numbers and characters that are not valid JSON
        return self.post_bytes(path, json.dumps(body).encode())

    def post_bytes(self, path: str, content: bytes) -> tuple[int, str]:
        response = self._runner.run(self.served.http.post(self.served.url + path, content=content))
        return response.status_code, response.text

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()


@pytest.fixture(scope="module", params=["refuse", "text"])
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    """A gateway that refuses images, and one that omits them."""
    opened = Gateway(AgentRequests(images=request.param))
    yield opened
    opened.close()


def check_refusal(path: str, status: int, text: str) -> None:
    """Assert that an error has the API's own form, and a message."""
    body = json.loads(text)
    error = body["error"]
    if status == 404:
        # the only error that makes a client send a whole conversation again
        assert error["details"] == {"error_code": "thread_not_found"}, text
        return
    assert status in (400, 413, 415), text
    assert isinstance(error["message"], str), text
    assert len(error["message"]) > 5, text
    if path == MESSAGES:
        assert body["type"] == "error"
        assert error["type"] in ("invalid_request_error", "request_too_large")
    elif path == GOOGLE:
        assert (error["code"], error["status"]) == (status, "INVALID_ARGUMENT")
    else:
        assert error["type"] == "invalid_request_error"
        assert error["code"]


def is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    return all(map(is_finite, value)) if isinstance(value, list) else True


@each_api
def test_no_request_breaks_the_gateway(gateway: Gateway, path: str) -> None:
    counts = {200: 0, 400: 0}

    @settings(max_examples=N_REQUESTS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(REQUESTS[path]())
    def check(body: Body) -> None:
        status, text = gateway.post(path, body)
        counts[status] = counts.get(status, 0) + 1
        if status != 200:
            check_refusal(path, status, text)
        elif not body.get("stream"):
            assert isinstance(json.loads(text), dict)
        else:
            assert text.endswith("\n\n")
        assert status != 200 or is_finite(body)
        failure = gateway.served.calls.failure
        assert failure is None, repr(failure)

    check()
    # otherwise the test would prove little; a short run can miss either by chance
    assert N_REQUESTS < 500 or min(counts[200], counts[400]) >= N_REQUESTS / 20
    assert gateway.post(path, PLAIN[path])[0] == 200


@each_api
def test_no_bytes_break_the_gateway(gateway: Gateway, path: str) -> None:
    plain = json.dumps(PLAIN[path]).encode()

    @settings(max_examples=repeats(20, 500), deadline=None, database=None)
    @given(st.integers(0, len(plain)), st.binary(max_size=4), st.integers(0, 4))
    def check(at: int, added: bytes, n_dropped: int) -> None:
        status, text = gateway.post_bytes(path, plain[:at] + added + plain[at + n_dropped :])
        if status != 200:
            check_refusal(path, status, text)

    check()
    assert gateway.post(path, PLAIN[path])[0] == 200
