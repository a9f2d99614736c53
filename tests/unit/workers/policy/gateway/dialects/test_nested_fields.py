"""Every field of the objects within requests is in a table: those that the vendors' types reach from handled fields.

A kind of part, item, block or tool that is refused, or omitted by name, is not searched, as none of its fields counts.
"""

from __future__ import annotations

import asyncio
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic
import pytest
import typing_extensions

from tests.unit.workers.policy.gateway.serving import Playing, served
from workers.policy.gateway.dialects import request_fields as tables
from workers.policy.gateway.dialects.request_fields import _OF_THE_VENDOR, RequestFields, json_schema
from workers.testing import answering

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GOOGLE = "/v1beta/models/m:generateContent"
BODY = {"messages": [{"role": "user", "content": "hello"}]}
TOOL = {"name": "look"}

PLACES: dict[str, RequestFields] = {
    "chat": tables.CHAT,
    "chat.messages": tables.CHAT_MESSAGE,
    "chat.messages.content": tables.TEXT_PART,
    "chat.messages.tool_calls": tables.CHAT_CALL,
    "chat.messages.tool_calls.function": tables.CHAT_CALLED,
    "chat.tools": tables.CHAT_TOOL,
    "chat.tools.function": tables.CHAT_FUNCTION,
    "chat.tool_choice": tables.TOOL_CHOICE,
    "chat.tool_choice.function": tables.TOOL_CHOICE,
    "chat.tool_choice.allowed_tools": tables.TOOL_CHOICE,
    "chat.response_format": tables.FORMAT,
    "chat.response_format.json_schema": tables.FORMAT,
    "chat.stream_options": tables.STREAM_OPTIONS,
    "responses": tables.RESPONSES,
    "responses.input": tables.ITEM,
    "responses.input.content": tables.TEXT_PART,
    "responses.input.output": tables.TEXT_PART,
    "responses.input.summary": tables.TEXT_PART,
    "responses.tools": tables.RESPONSES_TOOL,
    "responses.tools.tools": tables.RESPONSES_TOOL,
    "responses.tool_choice": tables.TOOL_CHOICE,
    "responses.text": tables.TEXT_CONFIG,
    "responses.text.format": tables.FORMAT,
    "responses.reasoning": tables.REASONING,
    "messages": tables.MESSAGES,
    "messages.messages": tables.MESSAGE,
    "messages.messages.content": tables.BLOCK,
    "messages.messages.content.content": tables.BLOCK,
    "messages.system": tables.BLOCK,
    "messages.tools": tables.MESSAGES_TOOL,
    "messages.tool_choice": tables.TOOL_CHOICE,
    "messages.thinking": tables.THINKING,
    "messages.thread": tables.THREAD,
    "messages.metadata": tables.METADATA,
    "messages.mcp_servers": tables.MCP_SERVER,
    "messages.output_config": tables.OUTPUT_CONFIG,
    "messages.output_config.format": tables.FORMAT,
    "google.contents": tables.GOOGLE_CONTENT,
    "google.contents.parts": tables.GOOGLE_PART,
    "google.contents.parts.functionCall": tables.GOOGLE_CALL,
    "google.contents.parts.functionResponse": tables.GOOGLE_RESULT,
    "google.tools": tables.GOOGLE_TOOL,
    "google.tools.functionDeclarations": tables.GOOGLE_FUNCTION,
    "google.toolConfig": tables.GOOGLE_TOOL_CONFIG,
    "google.toolConfig.functionCallingConfig": tables.GOOGLE_CALLING,
    "google.generationConfig": tables.GOOGLE_CONFIG,
    "google.generationConfig.thinkingConfig": tables.GOOGLE_THINKING,
}
TAKEN = {
    # parts, items and blocks
    *("text", "refusal", "input_text", "output_text", "summary_text", "reasoning_text"),
    *("message", "function_call", "function_call_output", "reasoning"),
    *("thinking", "redacted_thinking", "tool_use", "tool_result"),
    # tools, and choices of them
    *("function", "namespace", "url", "allowed_tools", "auto", "any", "tool", "none"),
    # forms and settings
    *("json_schema", "json_object", "enabled", "disabled", "adaptive", "between_tools", "create", "continue"),
}
"""The kinds that are not refused. test_request_fields checks, by kind, that all others are."""
SCHEMAS = {"messages.tools.input_schema", "google.tools.functionDeclarations.parameters"} | {
    "google.generationConfig.responseSchema"
}
"""The places of JSON schemas, all of whose fields are shown to the policy."""


def kind_of(fields: Mapping[str, Any]) -> str:
    """Return the only `type` of an object; empty if it has none, or may omit it."""
    hint: Any = fields.get("type")
    while typing.get_origin(hint) not in (None, typing.Literal):
        hint = None if type(None) in typing.get_args(hint) else typing.get_args(hint)[0]
    return str(typing.get_args(hint)[0]) if typing.get_origin(hint) is typing.Literal else ""


def fields_of(kind: Any) -> dict[str, Any] | None:
    """Return the fields of a client's type, with their types; None if it is not an object."""
    if typing_extensions.is_typeddict(kind):
        return typing_extensions.get_type_hints(kind)
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        return {each.alias or name: each.annotation for name, each in kind.model_fields.items()}
    return None


def objects(hint: Any, place: str, seen: frozenset[Any] = frozenset()) -> Iterator[tuple[str, Any, set[str]]]:
    """Yield the objects accepted at a place and within it: the place, the type, the names of its fields."""
    fields = fields_of(hint)
    if fields is None:
        for each in typing.get_args(hint):
            yield from objects(each, place, seen)
        return
    if hint in seen or place in SCHEMAS or kind_of(fields) not in {"", *TAKEN}:
        return
    yield place, hint, set(fields)
    table = PLACES.get(place)
    if table is None:
        return
    for name, kind in fields.items():
        if name in table.handled:
            yield from objects(kind, f"{place}.{name}", seen | {hint})


def reached(api: str) -> Iterator[tuple[str, Any, set[str]]]:
    if api == "chat":
        from openai.types.chat.completion_create_params import CompletionCreateParamsBase

        yield from objects(CompletionCreateParamsBase, "chat")
    elif api == "responses":
        from openai.types.responses.input_token_count_params import InputTokenCountParams
        from openai.types.responses.response_create_params import ResponseCreateParamsBase

        yield from objects(ResponseCreateParamsBase, "responses")
        yield from objects(InputTokenCountParams, "responses")
    elif api == "messages":
        from anthropic.types import message_count_tokens_params, message_create_params
        from anthropic.types.beta import message_count_tokens_params as beta_counting
        from anthropic.types.beta import message_create_params as beta_creating

        for kind in (
            message_create_params.MessageCreateParamsBase,
            beta_creating.MessageCreateParamsBase,
            message_count_tokens_params.MessageCountTokensParams,
            beta_counting.MessageCountTokensParams,
        ):
            yield from objects(kind, "messages")
    else:
        from google.genai import types

        yield from objects(types.Content, "google.contents")
        yield from objects(types.Tool, "google.tools")
        yield from objects(types.ToolConfig, "google.toolConfig")
        yield from objects(types.GenerationConfig, "google.generationConfig")


@pytest.mark.parametrize("api", ["chat", "responses", "messages", "google"])
def test_every_field_of_every_object_is_in_a_table(api: str) -> None:
    seen = set()
    for place, kind, names in reached(api):
        table = PLACES.get(place)
        assert table is not None, f"{kind.__name__} is in no table: decide for each field of {place}"
        known = table.handled | table.refused.keys() | table.ignored.keys()
        assert names - known == set(), f"{place} ({kind.__name__}): decide each: handled, refused or ignored, and why"
        seen.add(place)
    assert {place for place in PLACES if place.partition(".")[0] == api} <= seen, "a place that no type has"


def test_every_field_of_a_schema_is_shown_or_known() -> None:
    from google.genai import types

    names = {each.alias or name for name, each in types.Schema.model_fields.items()}
    shown = json_schema(dict.fromkeys(names, "x")) or {}
    assert {name.removeprefix("$") for name in shown} == names - _OF_THE_VENDOR


def test_schema_definitions_are_inlined() -> None:
    given = {
        "defs": {"Place": {"type": "OBJECT", "properties": {"x": {"type": "INTEGER", "nullable": True}}}},
        "type": "OBJECT",
        "properties": {
            "from": {"ref": "#/defs/Place"},
            "to": {"ref": "#/defs/Place", "nullable": True},
            "by": {"anyOf": [{"type": "STRING"}], "nullable": True},
        },
    }
    null = {"type": "null"}
    assert json_schema(given) == {
        "$defs": {"Place": {"type": "object", "properties": {"x": {"type": ["integer", "null"]}}}},
        "type": "object",
        "properties": {
            "from": {"$ref": "#/$defs/Place"},
            "to": {"anyOf": [{"$ref": "#/$defs/Place"}, null]},
            "by": {"anyOf": [{"type": "string"}, null]},
        },
    }


def refused(path: str, body: Mapping[str, Any]) -> tuple[int, str]:
    async def main() -> tuple[int, str]:
        async with served(Playing(answer=lambda _: answering("yes"))) as gateway:
            response = await gateway.post(path, body)
            return response.status_code, response.text

    return asyncio.run(main())


def part(part: Mapping[str, Any], role: str = "user") -> dict[str, Any]:
    return {"contents": [{"role": role, "parts": [part]}]}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (GOOGLE, part({"functionCall": {"name": "look", "partial_args": [{"a": 1}]}}, "model"), "partialArgs"),
        (GOOGLE, part({"functionResponse": {"name": "look", "parts": [{"text": "x"}]}}), "parts"),
        (GOOGLE, {"contents": "x", "tools": [{"functionDeclarations": [{**TOOL, "parameters": 7}]}]}, "parameters"),
        (CHAT, {**BODY, "tools": [{"type": "function", "function": {**TOOL, "parameters": 7}}]}, "parameters"),
        (RESPONSES, {"input": "x", "tools": [{"type": "function", **TOOL, "parameters": []}]}, "parameters"),
        (MESSAGES, {**BODY, "tools": [{**TOOL, "input_schema": {}, "input_examples": 7}]}, "input_examples"),
    ],
)
def test_content_that_cannot_be_shown_is_refused_by_name(path: str, body: Mapping[str, Any], named: str) -> None:
    status, text = refused(path, body)
    assert status == 400, text
    assert named in text


def test_examples_of_a_tool_are_shown() -> None:
    async def main() -> None:
        policy = Playing(answer=lambda _: answering("yes"))
        async with served(policy) as gateway:
            tool = {"name": "look", "input_schema": {"type": "object"}, "input_examples": [{"path": "a.py"}]}
            for described in ({}, {"description": "Looks."}):
                await gateway.post(MESSAGES, {**BODY, "tools": [{**tool, **described}]})
            shown = [tools[0]["function"]["description"] for _, tools, *_ in policy.asked]
            examples = 'Examples of its input:\n{"path":"a.py"}'
            assert shown == [examples, f"Looks.\n{examples}"]

    asyncio.run(main())


@pytest.mark.parametrize("verb", ["embedContent", "batchEmbedContents"])
def test_embeddings_of_google_are_not_supported(verb: str) -> None:
    status, text = refused(f"/v1beta/models/m:{verb}", {"content": "x"})
    assert status == 404
    assert "embeddings are not supported" in text
