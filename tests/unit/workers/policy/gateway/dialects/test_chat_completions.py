"""Chat completions, through the vendor's own client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from farm.records.request import SamplingParams
from tests.unit.workers.policy.gateway.serving import Playing, Served, served, thinking
from workers.plugins.interfaces import Delta
from workers.testing import answering, calling

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


async def ask(gateway: Served, **more: Any) -> Any:
    return await gateway.openai.chat.completions.create(**{"model": "m", "messages": ASKED, **more})


async def chunks(gateway: Served, **more: Any) -> list[Any]:
    return [chunk async for chunk in await ask(gateway, stream=True, **more)]


def test_text() -> None:
    async def main() -> None:
        async with served(Playing(answering("good day", n_tokens=3))) as gateway:
            answer = await ask(gateway)
            choice = answer.choices[0]
            assert (choice.message.content, choice.finish_reason, answer.model) == ("good day", "stop", "m")
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 3, 8)

    asyncio.run(main())


def test_tool_calls_and_reasoning() -> None:
    async def main() -> None:
        policy = Playing(thinking("hm", calling(("look", {"at": "é"}), ("look", "{no json"))))
        async with served(policy) as gateway:
            choice = (await ask(gateway, tools=[TOOL, {"type": "web_search"}])).choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            assert choice.message.reasoning_content == "hm"
            assert [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
                ("call_0", "look", json.dumps({"at": "é"})),
                ("call_1", "look", "{no json"),
            ]
            assert policy.asked[0][1] == [TOOL]
            assert gateway.records.calls[0].sampling["asked"] == {"model": "m", "tools_left_out": ["web_search"]}

    asyncio.run(main())


def test_text_is_streamed_as_it_is_sampled() -> None:
    async def main() -> None:
        policy = Playing(answering("good day"))
        policy.first, policy.gate = [Delta("good ")], asyncio.Event()
        async with served(policy) as gateway:
            stream = await ask(gateway, stream=True)
            first, second = await anext(stream), await anext(stream)
            assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
            assert second.choices[0].delta.content == "good ", "it was not held back until the end"
            policy.gate.set()
            rest = [chunk.choices[0] async for chunk in stream]
            assert [(each.delta.content, each.finish_reason) for each in rest] == [("day", None), (None, "stop")]

    asyncio.run(main())


def test_stream_adds_up_to_the_answer() -> None:
    async def main() -> None:
        async with served(Playing(thinking("let me see", calling(("look", {"at": 1}), content="I look.")))) as gateway:
            result = await chunks(gateway, stream_options={"include_usage": True})
            deltas = [chunk.choices[0].delta for chunk in result[:-1]]
            assert "".join(delta.content or "" for delta in deltas) == "I look."
            assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "let me see"
            (call,) = [call for delta in deltas for call in delta.tool_calls or []]
            assert (call.index, call.id, call.function.name, call.function.arguments) == (
                0,
                "call_0",
                "look",
                '{"at": 1}',
            )
            assert [chunk.choices[0].finish_reason for chunk in result[-2:-1]] == ["tool_calls"]
            assert (result[-1].choices, result[-1].usage.total_tokens) == ([], 15)
            assert len({chunk.id for chunk in result}) == 1

    asyncio.run(main())


def test_stream_events() -> None:
    async def main() -> None:
        async with served(Playing(answering("hi"))) as gateway:
            events = await gateway.events("/v1/chat/completions", {"model": "m", "messages": ASKED, "stream": True})
            assert [name for name, _ in events] == [""] * 4
            assert events[-1] == ("", "[DONE]")
            last = json.loads(events[-2][1])["choices"][0]
            assert last == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}

    asyncio.run(main())


@pytest.mark.parametrize(("asked", "sent"), [(None, 9), (7, 7), (20, 9)])
def test_trainers_sampling_overrides_the_clients(asked: int | None, sent: int) -> None:
    async def main() -> None:
        policy = Playing(answering("hi"))
        ours = SamplingParams(temperature=0.7, stop=("END",), max_tokens=9)
        async with served(policy, sampling=ours) as gateway:
            wishes = {"temperature": 0.0, "stop": ["\n\n", "END"], **({} if asked is None else {"max_tokens": asked})}
            await ask(gateway, top_p=0.5, **wishes)
            _, _, sampling, max_tokens = policy.asked[0]
            assert (sampling.temperature, sampling.top_p, sampling.stop) == (0.7, None, ("END", "\n\n"))
            assert max_tokens == sent
            recorded = gateway.records.calls[0].sampling
            assert (recorded["temperature"], recorded["max_tokens"], recorded["stop"]) == (0.7, sent, ["END", "\n\n"])
            assert recorded["asked"] == {"model": "m", "top_p": 0.5, **wishes}

    asyncio.run(main())


def test_client_specific_keys_of_messages_are_removed() -> None:
    async def main() -> None:
        policy = Playing(answering("hi"))
        call = {"id": "c1", "type": "function", "index": 0, "function": {"arguments": "{}", "name": "look"}}
        messages: list[Any] = [
            {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
            {"role": "user", "content": "look", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [call], "provider_specific_fields": {"refusal": None}},
            {"role": "tool", "tool_call_id": "c1", "content": "seen", "extra": 1},
            {"role": "assistant", "content": "hm", "reasoning": "I see", "tool_calls": None},
        ]
        async with served(policy) as gateway:
            await ask(gateway, messages=messages)
        assert policy.asked[0][0] == [
            {"role": "system", "content": "be\nbrief"},
            {"role": "user", "content": "look"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "seen"},
            {"role": "assistant", "content": "hm", "reasoning_content": "I see"},
        ]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "ghost", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages[0].tool_calls[0].function"),
        ({"n": 2}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_malformed_requests_are_refused(wrong: dict[str, Any], param: str) -> None:
    from openai import BadRequestError

    async def main() -> None:
        async with served(Playing()) as gateway:
            with pytest.raises(BadRequestError) as caught:
                await gateway.openai.chat.completions.create(**{"model": "m", "messages": ASKED, **wrong})
            assert caught.value.param == param
            assert gateway.calls.failure is None
            assert gateway.records.calls == []

    asyncio.run(main())


def test_models() -> None:
    async def main() -> None:
        async with served(Playing()) as gateway:
            assert [model.id async for model in gateway.openai.models.list()] == ["policy"]
            assert (await gateway.openai.models.retrieve("org/any")).id == "org/any"

    asyncio.run(main())
