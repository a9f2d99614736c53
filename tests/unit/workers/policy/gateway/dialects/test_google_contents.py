"""Google's generateContent, through the vendor's own client."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from farm.errors import EngineError, LimitReached
from farm.records.rollout import Outcome
from tests.unit.workers.policy.gateway.serving import Playing, Served, served, thinking
from workers.testing import answering, calling

if TYPE_CHECKING:
    from google.genai.types import GenerateContentResponse

PATH = "/v1beta/models/m:generateContent"
LOOK = {
    "name": "look",
    "description": "Looks.",
    "parameters": {
        "type": "OBJECT",
        "properties": {
            "at": {"type": "INTEGER", "nullable": True},
            "all": {"type": "ARRAY", "min_items": 1, "items": {"type": "STRING"}},
        },
    },
}
TOOLS = [{"function_declarations": [LOOK]}, {"google_search": {}}]
THOUGHTS = {"include_thoughts": True}
"""Return them as the vendor's client expects: it makes its own types of them."""


async def ask(gateway: Served, contents: Any = "hello", **config: Any) -> GenerateContentResponse:
    from google.genai.types import GenerateContentConfig, GenerateContentResponse

    answer = await gateway.google.models.generate_content(
        model="m", contents=contents, config=GenerateContentConfig(**config)
    )
    assert isinstance(answer, GenerateContentResponse)
    return answer


async def streamed(gateway: Served, **config: Any) -> list[GenerateContentResponse]:
    from google.genai.types import GenerateContentConfig

    stream = await gateway.google.models.generate_content_stream(
        model="m", contents="hello", config=GenerateContentConfig(**config)
    )
    return [each async for each in stream]


def test_text() -> None:
    from google.genai.types import FinishReason

    async def main() -> None:
        policy = Playing(replace(answering("good day", n_tokens=3), n_cached_tokens=4))
        async with served(policy) as gateway:
            answer = await ask(gateway, system_instruction="be brief", max_output_tokens=9, stop_sequences=["x"])
            assert (answer.text, answer.model_version) == ("good day", "m")
            assert answer.candidates is not None
            assert answer.candidates[0].finish_reason == FinishReason.STOP
            usage = answer.usage_metadata
            assert usage is not None
            counts = (usage.prompt_token_count, usage.candidates_token_count, usage.cached_content_token_count)
            assert counts == (5, 3, 4)
            messages, _, sampling, max_tokens = policy.asked[0]
            assert messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
            assert (sampling.stop, max_tokens) == (("x",), 9)

    asyncio.run(main())


@pytest.mark.parametrize("with_ids", [True, False])
def test_function_calls_and_results(with_ids: bool) -> None:
    from google.genai.types import Content, FunctionResponse, Part

    async def main() -> None:
        first = thinking("hm", calling(("look", '{ "at":1 }'), ("look", "{no json"), content="I look."))
        policy = Playing(first, answering("seen"))
        async with served(policy) as gateway:
            config: Any = {"tools": TOOLS, "thinking_config": THOUGHTS}
            answer = await ask(gateway, **config)
            schema = policy.asked[0][1][0]["function"]["parameters"]
            assert schema["type"] == "object"
            assert schema["properties"]["at"] == {"type": ["integer", "null"]}
            assert schema["properties"]["all"] == {"type": "array", "minItems": 1, "items": {"type": "string"}}
            assert gateway.records.calls[0].sampling["asked"]["tools_left_out"] == ["googleSearch"]
            assert answer.function_calls is not None
            assert [call.args for call in answer.function_calls] == [{"at": 1}, {"malformed": "{no json"}]
            assert answer.candidates is not None
            said = answer.candidates[0].content
            assert said is not None
            assert said.parts is not None
            assert [(part.text, part.thought) for part in said.parts[:2]] == [("hm", True), ("I look.", None)]
            results = [
                FunctionResponse(id=call.id, name="look", response={"result": f"tree {number}"})
                for number, call in enumerate(answer.function_calls)
            ]
            if not with_ids:
                for part in said.parts:
                    if part.function_call is not None:
                        part.function_call.id = None
                results = [each.model_copy(update={"id": None}) for each in results]
            answers = Content(role="user", parts=[Part(function_response=each) for each in results])
            asked = Content(role="user", parts=[Part(text="hello")])
            await ask(gateway, [asked, said, answers], **config)
            history = policy.asked[1][0]
            calls = history[1]["tool_calls"]
            # the spacing of the arguments is the sampled one
            assert [call["function"]["arguments"] for call in calls] == ['{ "at":1 }', "{no json"]
            assert history[1]["reasoning_content"] == "hm"
            assert [message["content"] for message in history[2:]] == ["tree 0", "tree 1"]
            assert [message["tool_call_id"] for message in history[2:]] == [call["id"] for call in calls]
            assert [message["role"] for message in gateway.records.calls[1].messages] == ["tool", "tool"]

    asyncio.run(main())


@pytest.mark.parametrize("shown", [True, False])
def test_stream_adds_up_to_the_answer(shown: bool) -> None:
    async def main() -> None:
        policy = Playing(thinking("hm hm", calling(("look", {"at": 1}), content="I look again.")))
        async with served(policy) as gateway:
            pieces = await streamed(gateway, thinking_config=THOUGHTS if shown else None)
            parts = [
                part
                for piece in pieces
                for each in piece.candidates or []
                for part in (each.content.parts if each.content else None) or []
            ]
            assert "".join(part.text or "" for part in parts if part.thought) == ("hm hm" if shown else "")
            assert "".join(part.text or "" for part in parts if not part.thought) == "I look again."
            assert [part.function_call.args for part in parts if part.function_call] == [{"at": 1}]
            assert len(pieces) > 2
            assert pieces[-1].usage_metadata is not None
            assert {piece.response_id for piece in pieces} == {pieces[0].response_id}

    asyncio.run(main())


def test_silence_does_not_break_a_stream() -> None:
    async def main() -> None:
        policy = Playing(answering("late"))
        policy.gate = asyncio.Event()
        async with served(policy, silence_s=0.01) as gateway:
            asked = asyncio.create_task(streamed(gateway))
            await policy.begun.wait()
            await asyncio.sleep(0.05)
            policy.gate.set()
            pieces = await asked
            assert "".join(piece.text or "" for piece in pieces) == "late"
            assert len(pieces) > 2, "there was a ping"

    asyncio.run(main())


def test_tokens_are_counted() -> None:
    async def main() -> None:
        async with served(Playing()) as gateway:
            counted = await gateway.google.models.count_tokens(model="a/b", contents="x" * 400)
            assert counted.total_tokens == 101

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "status", "name"),
    [
        (EngineError("engine http://10.0.0.7 is gone"), 503, "UNAVAILABLE"),
        (LimitReached(Outcome.CONTEXT_FULL, "9000 tokens"), 400, "INVALID_ARGUMENT"),
        (LimitReached(Outcome.MAX_TURNS, "all"), 403, "PERMISSION_DENIED"),
    ],
)
def test_errors_are_those_of_the_vendor(error: Exception, status: int, name: str) -> None:
    from google.genai.errors import APIError

    async def main() -> None:
        async with served(Playing(error, error)) as gateway:
            for work in (ask(gateway), streamed(gateway)):
                with pytest.raises(APIError) as raised:
                    await work
                assert (raised.value.code, raised.value.status) == (status, name)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"contents": []}, "contents"),
        ({}, "contents"),
        ({"contents": [{"parts": [{"text": "a", "inlineData": {}}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "a/b", "data": ""}}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"role": "judge", "parts": [{"text": "a"}]}]}, "contents[0].role"),
        ({"contents": [{"role": "model", "parts": [{"executableCode": {}}]}]}, "contents[0].parts[0]"),
        ({"contents": "hi", "cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"contents": "hi", "cached_content": "cachedContents/1"}, "cachedContent"),
        ({"contents": "hi", "generationConfig": {"candidateCount": 2}}, "generationConfig.candidateCount"),
        ({"contents": "hi", "generationConfig": {"responseModalities": ["AUDIO"]}}, "responseModalities"),
        ({"contents": "hi", "generationConfig": {"speechConfig": {"a": 1}}}, "speechConfig"),
        ({"contents": "hi", "generationConfig": {"maxOutputTokens": 0}}, "maxOutputTokens"),
        ({"contents": "hi", "generationConfig": 3}, "generationConfig"),
        ({"contents": "hi", "tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
    ],
)
def test_unsupported_fields_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    async def main() -> None:
        policy = Playing(answering("never"))
        async with served(policy) as gateway:
            response = await gateway.post(PATH, body)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["status"]) == (400, 400, "INVALID_ARGUMENT")
            assert param in error["message"]
        assert policy.asked == []

    asyncio.run(main())


def test_camel_case_and_snake_case_are_read() -> None:
    async def main() -> None:
        policy = Playing(answering("yes"))
        async with served(policy) as gateway:
            call = {"functionCall": {"name": "look", "args": {}}}
            result = {"function_response": {"name": "look", "response": {"seen": "no"}}}
            contents = [{"parts": {"text": "hi"}}, {"role": "model", "parts": [call]}, {"parts": [result]}]
            body = {"contents": contents, "system_instruction": {"parts": [{"text": "be brief"}]}}
            response = await gateway.post(PATH, {**body, "generation_config": {"max_output_tokens": 7}})
            assert response.status_code == 200, response.text
            assert [message["role"] for message in policy.asked[0][0]] == ["system", "user", "assistant", "tool"]
            assert json.loads(policy.asked[0][0][3]["content"]) == {"seen": "no"}
            assert policy.asked[0][3] == 7

    asyncio.run(main())


def test_stream_without_sse_is_refused() -> None:
    async def main() -> None:
        async with served(Playing()) as gateway:
            response = await gateway.post("/v1beta/models/m:streamGenerateContent", {"contents": "hi"})
            assert response.status_code == 400
            assert "alt=sse" in response.json()["error"]["message"]

    asyncio.run(main())
