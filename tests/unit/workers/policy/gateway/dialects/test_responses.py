"""The responses API, through the vendor's own client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.workers.policy.gateway.serving import Playing, Served, served, thinking
from workers.plugins.interfaces import Delta
from workers.testing import answering, calling

TOOL = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True}

TEXTS = ("reasoning_text", "output_text")


async def ask(gateway: Served, **more: Any) -> Any:
    return await gateway.openai.responses.create(**{"model": "m", "input": "hello", **more})


async def streamed(gateway: Served, **more: Any) -> list[Any]:
    return [event async for event in await ask(gateway, stream=True, **more)]


def test_text() -> None:
    async def main() -> None:
        async with served(Playing(answering("good day", n_tokens=3))) as gateway:
            answer = await ask(gateway, instructions="be brief", metadata={"a": "b"})
            assert (answer.output_text, answer.status, answer.error) == ("good day", "completed", None)
            assert (answer.usage.input_tokens, answer.usage.output_tokens) == (5, 3)
            assert (answer.instructions, answer.metadata) == ("be brief", {"a": "b"})
            assert gateway.records.calls[0].messages == [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "hello"},
            ]

    asyncio.run(main())


def test_calls_and_reasoning() -> None:
    async def main() -> None:
        policy = Playing(thinking("hm", calling(("look", {"at": 1}), content="I look.")))
        async with served(policy) as gateway:
            answer = await ask(gateway, tools=[TOOL, {"type": "web_search"}])
            reasoning, message, call = answer.output
            assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "hm", [])
            assert (message.type, message.content[0].text) == ("message", "I look.")
            assert (call.call_id, call.name, call.arguments) == ("call_0", "look", '{"at": 1}')
            function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
            assert policy.asked[0][1] == [{"type": "function", "function": function}]
            assert gateway.records.calls[0].sampling["asked"]["tools_left_out"] == ["web_search"]

    asyncio.run(main())


def test_items_of_one_message_are_joined_again() -> None:
    async def main() -> None:
        first = thinking("hm", calling(("look", {"at": 1}), ("look", {"at": 2}), content="I look."))
        policy = Playing(first, answering("two things"))
        async with served(policy) as gateway:
            answer = await ask(gateway)
            results = [
                {"type": "function_call_output", "call_id": "call_0", "output": "one"},
                {
                    "type": "function_call_output",
                    "call_id": "call_1",
                    "output": [{"type": "input_text", "text": "two"}],
                },
            ]
            said = [item.model_dump(exclude_none=True) for item in answer.output]
            await ask(gateway, input=[{"role": "user", "content": "hello"}, *said, *results])
            assert policy.asked[1][0] == [
                {"role": "user", "content": "hello"},
                first.response,
                {"role": "tool", "tool_call_id": "call_0", "content": "one"},
                {"role": "tool", "tool_call_id": "call_1", "content": "two"},
            ]
            assert gateway.records.calls[1].messages == policy.asked[1][0][2:], "only new messages are recorded"

    asyncio.run(main())


def test_consecutive_answers_are_not_joined() -> None:
    async def main() -> None:
        policy = Playing(answering("hi"))
        said = [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}]},
            {"type": "message", "role": "assistant", "content": "c"},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": ""},
            {"type": "reasoning", "id": "rs_2", "summary": []},
            {"type": "message", "role": "developer", "content": "d"},
        ]
        async with served(policy) as gateway:
            await ask(gateway, input=said)
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": ""}}
        assert policy.asked[0][0] == [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "assistant", "content": "c", "reasoning_content": "so", "tool_calls": [call]},
            {"role": "user", "content": "d"},
        ]

    asyncio.run(main())


def test_response_continues_a_previous_one() -> None:
    from openai import BadRequestError

    async def main() -> None:
        first = calling(("look", {"at": 1}))
        policy = Playing(first, answering("seen"), answering("again"))
        async with served(policy) as gateway:
            one = await ask(gateway, instructions="be brief")
            result = {"type": "function_call_output", "call_id": "call_0", "output": "a tree"}
            two = await ask(gateway, input=[result], previous_response_id=one.id, instructions="be long")
            await ask(gateway, input="and?", previous_response_id=two.id)
            value = {"role": "tool", "tool_call_id": "call_0", "content": "a tree"}
            assert policy.asked[1][0] == [
                {"role": "system", "content": "be long"},
                {"role": "user", "content": "hello"},
                first.response,
                value,
            ]
            assert policy.asked[2][0] == [
                {"role": "user", "content": "hello"},
                first.response,
                value,
                {"role": "assistant", "content": "seen"},
                {"role": "user", "content": "and?"},
            ]
            with pytest.raises(BadRequestError, match="resp_x"):
                await ask(gateway, previous_response_id="resp_x")

    asyncio.run(main())


def test_stream_adds_up_to_the_answer() -> None:
    async def main() -> None:
        policy = Playing(thinking("let me see", calling(("look", {"at": 1}), content="I look.")), answering("seen"))
        async with served(policy) as gateway:
            events = await streamed(gateway)
            assert [event.sequence_number for event in events] == list(range(len(events)))
            kinds = list(dict.fromkeys(event.type for event in events))
            assert kinds == [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
                "response.reasoning_text.delta",
                "response.reasoning_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.output_text.delta",
                "response.output_text.done",
                "response.function_call_arguments.delta",
                "response.function_call_arguments.done",
                "response.completed",
            ]
            said = {kind: "".join(e.delta for e in events if e.type == f"response.{kind}.delta") for kind in TEXTS}
            assert said == {"reasoning_text": "let me see", "output_text": "I look."}
            done = [event.item for event in events if event.type == "response.output_item.done"]
            assert [item.type for item in done] == ["reasoning", "message", "function_call"]
            last = events[-1].response
            assert [item.id for item in last.output] == [item.id for item in done]
            assert last.id == events[0].response.id
            assert last.usage.total_tokens == 15
            follows = await ask(gateway, input="go on", previous_response_id=last.id)
            assert follows.output_text == "seen"

    asyncio.run(main())


def test_official_client_assembles_the_stream() -> None:
    async def main() -> None:
        async with served(Playing(calling(("look", {"at": 1}), content="I look."))) as gateway:
            async with gateway.openai.responses.stream(model="m", input="hello") as stream:
                async for _ in stream:
                    pass
                final = await stream.get_final_response()
            assert final.output_text == "I look."
            assert [item.type for item in final.output] == ["message", "function_call"]

    asyncio.run(main())


def test_text_is_streamed_as_it_is_sampled() -> None:
    async def main() -> None:
        policy = Playing(answering("good day"))
        policy.first, policy.gate = [Delta("good ")], asyncio.Event()
        async with served(policy) as gateway:
            stream = await ask(gateway, stream=True)
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
            assert event.delta == "good "
            policy.gate.set()
            rest = [event async for event in stream]
            assert rest[-1].response.output_text == "good day"

    asyncio.run(main())


def test_cut_answer_is_incomplete() -> None:
    async def main() -> None:
        cut = [answering("good", finish_reason="length") for _ in range(2)]
        async with served(Playing(*cut)) as gateway:
            answer = await ask(gateway, max_output_tokens=10)
            assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            events = await streamed(gateway, max_output_tokens=10)
            assert events[-1].type == "response.incomplete"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": [{"type": "computer_call"}]}, ""),
        ({"input": [{"role": "ghost", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": 3}, "input"),
        ({"instructions": 3}, "instructions"),
    ],
)
def test_malformed_requests_are_refused(wrong: dict[str, Any], param: str) -> None:
    from openai import BadRequestError

    async def main() -> None:
        async with served(Playing()) as gateway:
            with pytest.raises(BadRequestError) as caught:
                await ask(gateway, **wrong)
            assert (caught.value.param or "").startswith(param)
            assert caught.value.code == "invalid_request"

    asyncio.run(main())


NAMESPACE = {"type": "namespace", "name": "crew", "description": "Helpers.", "tools": [TOOL]}


@pytest.mark.parametrize("stream", [False, True])
def test_functions_of_a_namespace_are_mapped_both_ways(stream: bool) -> None:
    async def main() -> None:
        policy = Playing(calling(("crew__look", {"at": 1}), ("look", {})), answering("seen"))
        async with served(policy) as gateway:
            tools = [NAMESPACE, TOOL]
            if stream:
                items = (await streamed(gateway, tools=tools))[-1].response.output
            else:
                items = (await ask(gateway, tools=tools)).output
            assert [(item.name, item.namespace) for item in items] == [("look", "crew"), ("look", None)]
            functions = [tool["function"] for tool in policy.asked[0][1]]
            assert [(each["name"], each["description"]) for each in functions] == [
                ("crew__look", "Helpers.\nLooks."),
                ("look", "Looks."),
            ]
            results = [{"type": "function_call_output", "call_id": item.call_id, "output": "x"} for item in items]
            calls = [item.model_dump(exclude_none=True) for item in items]
            await ask(gateway, tools=tools, input=[{"role": "user", "content": "hello"}, *calls, *results])
            assert [call["function"]["name"] for call in policy.asked[1][0][1]["tool_calls"]] == ["crew__look", "look"]
            assert len(gateway.records.calls[1].messages) == 2, "the conversation continues"

    asyncio.run(main())


def test_two_functions_with_one_name_are_refused() -> None:
    async def main() -> None:
        async with served(Playing(answering("never"))) as gateway:
            body = {"input": "hello", "tools": [NAMESPACE, {**TOOL, "name": "crew__look"}]}
            response = await gateway.post("/v1/responses", body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "tools[1].name")

    asyncio.run(main())
