"""Anthropic's messages API over HTTP."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.workers.policy.gateway.serving import Playing, Served, served, thinking
from workers.plugins.interfaces import Delta
from workers.testing import answering, calling

THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hello"}], **more}


async def ask(gateway: Served, **more: Any) -> dict[str, Any]:
    response = await gateway.post("/v1/messages", body(**more))
    assert response.status_code == 200, response.text
    return dict(response.json())


async def streamed(gateway: Served, **more: Any) -> list[dict[str, Any]]:
    events = await gateway.events("/v1/messages", body(stream=True, **more))
    result = [json.loads(data) for _, data in events]
    assert [name for name, _ in events] == [event["type"] for event in result]
    return result


def test_text() -> None:
    async def main() -> None:
        policy = Playing(replace(answering("good day", n_tokens=3), n_cached_tokens=4))
        async with served(policy) as gateway:
            answer = await ask(gateway, system=[{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}])
            assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "m")
            assert answer["content"] == [{"type": "text", "text": "good day", "citations": None}]
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
            assert answer["usage"] == {
                "input_tokens": 1,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 4,
                "output_tokens": 3,
            }
            assert policy.asked[0][0] == [
                {"role": "system", "content": "be\nbrief"},
                {"role": "user", "content": "hello"},
            ]
            assert policy.asked[0][3] == 100

    asyncio.run(main())


def test_tool_calls_and_results() -> None:
    async def main() -> None:
        # the client may change the spacing of the arguments, but the sampled spacing is kept
        first = thinking("hm", calling(("look", '{ "at":1 }'), ("look", "{no json"), content="I look."))
        policy = Playing(first, answering("seen"))
        async with served(policy) as gateway:
            tools = [TOOL, {"type": "bash_20250124", "name": "bash"}]
            answer = await ask(gateway, tools=tools, **THINK)
            assert answer["stop_reason"] == "tool_use"
            assert answer["content"] == [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look.", "citations": None},
                {"type": "tool_use", "id": "call_0", "name": "look", "input": {"at": 1}},
                {"type": "tool_use", "id": "call_1", "name": "look", "input": {"malformed": "{no json"}},
            ]
            results = [
                {"type": "tool_result", "tool_use_id": "call_0", "content": "a tree"},
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "no"}]},
                {"type": "text", "text": "and"},
                {"type": "text", "text": "now?"},
            ]
            said = [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": answer["content"]},
                {"role": "user", "content": results},
            ]
            await ask(gateway, messages=said, tools=tools)
            assert policy.asked[1][0] == [
                {"role": "user", "content": "hello"},
                first.response,
                {"role": "tool", "tool_call_id": "call_0", "content": "a tree"},
                {"role": "tool", "tool_call_id": "call_1", "content": "no"},
                {"role": "user", "content": "and\nnow?"},
            ]
            function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
            assert policy.asked[0][1] == [{"type": "function", "function": function}]
            assert gateway.records.calls[1].messages == policy.asked[1][0][2:]
            assert gateway.records.calls[0].sampling["asked"]["tools_left_out"] == ["bash_20250124"]

    asyncio.run(main())


def test_call_that_the_client_changed_is_used_as_changed() -> None:
    async def main() -> None:
        policy = Playing(calling(("look", '{ "at":1 }')), answering("seen"))
        async with served(policy) as gateway:
            await ask(gateway)
            use = {"type": "tool_use", "id": "call_0", "name": "look", "input": {"at": 2}}
            await ask(gateway, messages=[{"role": "assistant", "content": [use]}])
            assert policy.asked[1][0][0]["tool_calls"][0]["function"]["arguments"] == '{"at":2}'

    asyncio.run(main())


def test_thinking_is_shown_on_request() -> None:
    async def main() -> None:
        async with served(Playing(*(thinking("hm", answering("hi")) for _ in range(2)))) as gateway:
            assert [block["type"] for block in (await ask(gateway))["content"]] == ["text"]
            events = await streamed(gateway)
            assert [event["content_block"]["type"] for event in events if "content_block" in event] == ["text"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("finish", "stop", "reason", "sequence"),
    [("length", None, "max_tokens", None), ("stop", "END", "stop_sequence", "END"), ("stop", 7, "end_turn", None)],
)
def test_stop_reasons(finish: str, stop: str | int | None, reason: str, sequence: str | None) -> None:
    async def main() -> None:
        completion = replace(answering("good", finish_reason=finish), stop_reason=stop)
        async with served(Playing(completion)) as gateway:
            answer = await ask(gateway, stop_sequences=["END"])
            assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)

    asyncio.run(main())


def test_stream_adds_up_to_the_answer() -> None:
    async def main() -> None:
        policy = Playing(thinking("let me see", calling(("look", {"at": 1}), ("look", {}), content="I look.")))
        async with served(policy) as gateway:
            events = await streamed(gateway, **THINK)
            start, *middle, delta, stop = events
            assert start["type"] == "message_start"
            assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
            assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
            assert (delta["usage"]["input_tokens"], delta["usage"]["output_tokens"]) == (5, 10)
            assert stop == {"type": "message_stop"}
            blocks: list[dict[str, Any]] = []
            for event in middle:
                if event["type"] == "content_block_start":
                    assert event["index"] == len(blocks)
                    blocks.append({**event["content_block"], "said": ""})
                elif event["type"] == "content_block_delta":
                    assert event["index"] == len(blocks) - 1
                    piece = {name: text for name, text in event["delta"].items() if name not in ("type", "signature")}
                    blocks[-1]["said"] += "".join(piece.values())
                else:
                    assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
            assert [(block["type"], block["said"]) for block in blocks] == [
                ("thinking", "let me see"),
                ("text", "I look."),
                ("tool_use", '{"at":1}'),
                ("tool_use", "{}"),
            ]

    asyncio.run(main())


def test_pings_are_sent_during_silence() -> None:
    async def main() -> None:
        policy = Playing(answering("good day"))
        policy.gate = asyncio.Event()
        async with served(policy, silence_s=0.01) as gateway:
            async with gateway.http.stream("POST", f"{gateway.url}/v1/messages", json=body(stream=True)) as response:
                lines = response.aiter_lines()
                seen = []
                async for line in lines:
                    seen.append(line)
                    if seen.count("event: ping") == 2:
                        policy.gate.set()
            assert seen[0] == "event: message_start"
            assert seen[-3:-1] == ["event: message_stop", 'data: {"type":"message_stop"}']

    asyncio.run(main())


def test_text_is_streamed_as_it_is_sampled() -> None:
    async def main() -> None:
        policy = Playing(answering("good day"))
        policy.first, policy.gate = [Delta("hm", reasoning=True), Delta("good ")], asyncio.Event()
        async with served(policy) as gateway:
            text = ""
            async with gateway.http.stream("POST", f"{gateway.url}/v1/messages", json=body(stream=True)) as response:
                async for line in response.aiter_lines():
                    text += line + "\n"
                    if "text_delta" in line:
                        policy.gate.set()
            assert '"text":"good "' in text
            assert '"text":"day"' in text

    asyncio.run(main())


def test_tokens_are_estimated() -> None:
    async def main() -> None:
        long = [{"role": "user", "content": "x" * 798}]
        async with served(Playing(replace(answering("hi"), n_prompt_tokens=100))) as gateway:
            before = (await gateway.post("/v1/messages/count_tokens", body(messages=long))).json()
            assert before == {"input_tokens": 200}
            await ask(gateway, messages=long)
            after = (await gateway.post("/v1/messages/count_tokens", body(messages=long))).json()
            assert after == {"input_tokens": 100}

    asyncio.run(main())


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": "hello"},
        {"messages": [{"role": "ghost", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "n", "input": 3}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
        {"max_tokens": "many"},
        {"stop_sequences": [3]},
        {"system": 3},
        {"tools": [{"input_schema": {}}]},
    ],
)
def test_malformed_requests_are_refused(wrong: dict[str, Any]) -> None:
    async def main() -> None:
        async with served(Playing()) as gateway:
            response = await gateway.post("/v1/messages", body(**wrong))
            assert response.status_code == 400
            assert response.json()["type"] == "error"
            assert response.json()["error"]["type"] == "invalid_request_error"

    asyncio.run(main())
