"""Requests that are too long for any context, on every API of the gateway: refused before they are rendered, and a long
one that its client abandons does not delay others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from farm.errors import LimitReached
from farm.records.rollout import Outcome
from tests.doubles import EngineDouble
from tests.integration.engines.test_rollout_policy import SAMPLING, USER, _Bench, run
from tests.unit.workers.policy.gateway.serving import served
from workers.policy.tokens import tokenizer

_CONTEXT = 5_000
_LONG = "x " * 60_000
_DEADLINE_S = 60.0
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": _LONG}}}

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"


def _user(text: str = "hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def _chat_call(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [_user(), {"role": "assistant", "content": "", "tool_calls": [call]}]


def _responses_call(arguments: str) -> list[dict[str, Any]]:
    return [_user(), {"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments}]


def _messages_call(value: str) -> list[dict[str, Any]]:
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": value}}
    return [_user(), {"role": "assistant", "content": [call]}]


def _long_names() -> str:
    return f'{{"{_LONG}": 1}}'


CHAT_BODIES: dict[str, dict[str, Any]] = {
    "text": {"messages": [_user(_LONG)]},
    "reasoning": {"messages": [_user(), {"role": "assistant", "content": "", "reasoning_content": _LONG}, _user()]},
    "calls": {"messages": [*_chat_call(_long_names()), {"role": "tool", "tool_call_id": "c1", "content": "done"}]},
    "result": {"messages": [*_chat_call("{}"), {"role": "tool", "tool_call_id": "c1", "content": _LONG}]},
    "description": {
        "messages": [_user()],
        "tools": [{"type": "function", "function": {"name": "look", "description": _LONG}}],
    },
    "schema": {
        "messages": [_user()],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": _SCHEMA}}],
    },
}
RESPONSES_BODIES: dict[str, dict[str, Any]] = {
    "text": {"input": _LONG},
    "instructions": {"input": "hi", "instructions": _LONG},
    "calls": {
        "input": [*_responses_call(_long_names()), {"type": "function_call_output", "call_id": "c1", "output": ""}]
    },
    "result": {"input": [*_responses_call("{}"), {"type": "function_call_output", "call_id": "c1", "output": _LONG}]},
    "description": {"input": "hi", "tools": [{"type": "function", "name": "look", "description": _LONG}]},
    "schema": {"input": "hi", "tools": [{"type": "function", "name": "look", "parameters": _SCHEMA}]},
}
MESSAGES_BODIES: dict[str, dict[str, Any]] = {
    "text": {"messages": [_user(_LONG)]},
    "system": {"messages": [_user()], "system": _LONG},
    "calls": {
        "messages": [
            *_messages_call(_LONG),
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "done"}]},
        ]
    },
    "result": {
        "messages": [
            *_messages_call("here"),
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": _LONG}]},
        ]
    },
    "description": {"messages": [_user()], "tools": [{"name": "look", "description": _LONG, "input_schema": {}}]},
    "schema": {"messages": [_user()], "tools": [{"name": "look", "input_schema": _SCHEMA}]},
}
BODIES = [
    pytest.param(path, body, id=f"{path.rpartition('/')[2]}-{name}")
    for path, bodies in ((CHAT, CHAT_BODIES), (RESPONSES, RESPONSES_BODIES), (MESSAGES, MESSAGES_BODIES))
    for name, body in bodies.items()
]


def _run_with_context(main: Callable[[_Bench], Coroutine[Any, Any, None]], context_tokens: int) -> None:
    run(main, EngineDouble(context_tokens=context_tokens, mean_tokens=4))


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_every_part_of_a_request_counts_towards_the_context_limit(path: str, body: dict[str, Any]) -> None:
    async def main(bench: _Bench) -> None:
        async with served(bench.policy()) as gateway:
            response = await gateway.post(path, {"model": "m", "max_tokens": 8, **body})
            assert response.status_code == 400, response.text
            assert "maximum context length" in response.text
            assert gateway.calls.limit is not None
            assert gateway.calls.limit.outcome is Outcome.CONTEXT_FULL
            assert f"characters in a context of {_CONTEXT} tokens" in str(gateway.calls.limit)
            # the client may continue with less
            assert (await gateway.post(CHAT, {"model": "m", "messages": [_user()]})).status_code == 200

    _run_with_context(main, _CONTEXT)


@pytest.mark.parametrize("token_in", [True, False])
def test_context_of_unknown_length_has_a_request_limit(token_in: bool) -> None:
    async def main(bench: _Bench) -> None:
        [known] = bench.listed
        assert known.info is not None
        info = known.info.model_copy(update={"context_tokens": None, **({} if token_in else {"token_in": ""})})
        bench.listed[0] = replace(known, info=info)
        tools = [{"type": "function", "function": {"name": "look", "description": "x" * 4_000_000}}]
        with pytest.raises(LimitReached, match=r"400\d{4} characters in a context of unknown length") as limit:
            await bench.policy().complete([USER], tools, SAMPLING, 8)
        assert limit.value.outcome is Outcome.CONTEXT_FULL

    _run_with_context(main, _CONTEXT)


def test_cancelled_long_request_does_not_block_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(bench: _Bench) -> None:
        encoder = tokenizer.load(str(bench.doubles[0].root)).tokenizer
        slow = _SlowBackend(encoder._backend)
        monkeypatch.setattr(encoder, "_backend", slow)
        policy = bench.policy()
        try:
            async with asyncio.timeout(_DEADLINE_S):
                given_up = asyncio.create_task(bench.ask(policy, [{"role": "user", "content": _LONG * 2}]))
                await asyncio.to_thread(slow.begun.wait)
                given_up.cancel()
                await asyncio.wait([given_up])
                assert given_up.cancelled()
                assert (await bench.ask(policy, [USER])).response["role"] == "assistant"
                assert not slow.free.is_set()
        finally:
            slow.free.set()

    _run_with_context(main, 100_000)


class _SlowBackend:
    """The library's tokenizer, which takes as long for a long text as the test wants."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.begun = threading.Event()
        self.free = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], **more: Any) -> Any:
        if len(texts[0]) > len(_LONG):
            self.begun.set()
            self.free.wait(_DEADLINE_S)
        return self._backend.encode_batch_fast(texts, **more)
