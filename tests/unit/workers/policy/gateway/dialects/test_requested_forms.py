"""The requested output format in each API's words, and the sampling that the policy gets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from farm.records.request import AgentRequests
from tests.unit.workers.policy.gateway.serving import Playing, served
from workers.policy.answer_form import FormedSampling
from workers.policy.generation import FormUnsupported
from workers.testing import answering

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GOOGLE = "/v1beta/models/m:generateContent"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
HELLO = {"role": "user", "content": "hello"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [HELLO],
        "tools": [{"type": "function", "function": {"name": name}} for name in ("look", "say")],
    },
    RESPONSES: {"input": "hello", "tools": [{"type": "function", "name": name} for name in ("look", "say")]},
    MESSAGES: {"messages": [HELLO], "tools": [{"name": name, "input_schema": {}} for name in ("look", "say")]},
    GOOGLE: {
        "contents": "hello",
        "tools": [{"functionDeclarations": [{"name": name} for name in ("look", "say")]}],
    },
}


def google(mode: str, *allowed: str) -> dict[str, Any]:
    return {"toolConfig": {"functionCallingConfig": {"mode": mode, "allowedFunctionNames": list(allowed)}}}


def asked(path: str, more: dict[str, Any], requests: AgentRequests | None = None) -> Any:
    """Return the sampling that the policy gets."""

    async def main() -> Any:
        policy = Playing(answering("yes"))
        async with served(policy, requests=requests) as gateway:
            response = await gateway.post(path, {**BODIES[path], **more})
            assert response.status_code == 200, response.text
        return policy.asked[0][2]

    return asyncio.run(main())


NONE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"tool_choice": "none"}),
    (RESPONSES, {"tool_choice": "none"}),
    (MESSAGES, {"tool_choice": {"type": "none"}}),
    (GOOGLE, google("NONE")),
]
REQUIRED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"tool_choice": "required"}),
    (RESPONSES, {"tool_choice": "required"}),
    (MESSAGES, {"tool_choice": {"type": "any"}}),
    (GOOGLE, google("ANY")),
]
NAMED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "say"}}}),
    (
        CHAT,
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "say"}}]},
            }
        },
    ),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "say"}}),
    (
        RESPONSES,
        {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "say"}],
            }
        },
    ),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "say"}}),
    (GOOGLE, google("any", "say")),
]
FREE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"tool_choice": "auto", "response_format": {"type": "text"}}),
    (CHAT, {"tool_choice": None, "response_format": None}),
    (RESPONSES, {"tool_choice": "auto", "text": {"format": {"type": "text"}, "verbosity": "low"}}),
    (MESSAGES, {"tool_choice": {"type": "auto"}, "output_config": {"effort": "low"}}),
    (GOOGLE, google("AUTO")),
    (GOOGLE, {"generationConfig": {"responseMimeType": "text/plain"}}),
]
FORMATS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
    (GOOGLE, {"generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA}}),
    (
        GOOGLE,
        {
            "generationConfig": {
                "response_mime_type": "application/json",
                "response_schema": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}},
            }
        },
    ),
]
OBJECTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"response_format": {"type": "json_object"}}),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}),
    (GOOGLE, {"generationConfig": {"responseMimeType": "application/json"}}),
]


@pytest.mark.parametrize(("path", "more"), NONE)
def test_tool_calls_can_be_disabled(path: str, more: dict[str, Any]) -> None:
    for requests in (None, AgentRequests(forms="ignore")):
        sampling = asked(path, more, requests)
        assert (sampling.tool_choice, sampling.needs_guide) == ("none", False)


@pytest.mark.parametrize(("path", "more"), REQUIRED)
def test_tool_call_can_be_required(path: str, more: dict[str, Any]) -> None:
    sampling = asked(path, more)
    assert (sampling.tool_choice, sampling.tools_allowed, sampling.required) == ("required", (), False)
    assert asked(path, more, AgentRequests(forms="require")).required
    assert not isinstance(asked(path, more, AgentRequests(forms="ignore")), FormedSampling)


@pytest.mark.parametrize(("path", "more"), NAMED)
def test_specific_tool_can_be_required(path: str, more: dict[str, Any]) -> None:
    sampling = asked(path, more)
    assert (sampling.tool_choice, sampling.tools_allowed) == ("required", ("say",))


@pytest.mark.parametrize(("path", "more"), FREE)
def test_request_without_a_format_is_sampled_by_the_batchs_settings(path: str, more: dict[str, Any]) -> None:
    assert not isinstance(asked(path, more), FormedSampling)


@pytest.mark.parametrize(("path", "more"), FORMATS)
def test_schema_is_passed_on(path: str, more: dict[str, Any]) -> None:
    assert asked(path, more).answer_schema == SCHEMA
    assert not isinstance(asked(path, more, AgentRequests(forms="ignore")), FormedSampling)


@pytest.mark.parametrize(("path", "more"), OBJECTS)
def test_json_object_is_a_schema_too(path: str, more: dict[str, Any]) -> None:
    assert asked(path, more).answer_schema == {"type": "object"}


@pytest.mark.parametrize(
    ("path", "more", "where"),
    [
        *((path, {"tool_choice": 7}, "tool_choice") for path in (CHAT, RESPONSES, MESSAGES)),
        *((path, {"tool_choice": "x"}, "tool_choice") for path in (CHAT, RESPONSES, MESSAGES)),
        *((path, {"tool_choice": {"a": 1}}, "tool_choice") for path in (CHAT, RESPONSES, MESSAGES)),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "custom", "custom": {"name": "say"}}}, "tool_choice"),
        (CHAT, {"tool_choice": "required", "tools": []}, "tool_choice"),
        (RESPONSES, {"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        (RESPONSES, {"tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}}, "tool_choice"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "fly"}}, "tool_choice"),
        (GOOGLE, google("MAYBE"), "toolConfig"),
        (GOOGLE, google("ANY", "fly"), "toolConfig"),
        (GOOGLE, {"toolConfig": 7}, "toolConfig"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
        (RESPONSES, {"text": 3}, "text"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        (GOOGLE, {"generationConfig": {"responseMimeType": "text/x.enum"}}, "responseMimeType"),
    ],
)
def test_invalid_format_is_refused_by_name(path: str, more: dict[str, Any], where: str) -> None:
    async def main() -> None:
        policy = Playing(answering("never"))
        async with served(policy) as gateway:
            response = await gateway.post(path, {**BODIES[path], **more})
            assert response.status_code == 400, response.text
            assert where in response.json()["error"]["message"]
        assert policy.asked == []

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_format_that_the_engine_does_not_know_is_refused_without_failing_the_rollout(stream: bool) -> None:
    async def main() -> None:
        unknown = FormUnsupported("engine http://10.0.0.7:8000 cannot")
        async with served(Playing(unknown, unknown, answering("free"))) as gateway:
            for more, field in ((REQUIRED[0][1], "tool_choice"), (FORMATS[0][1], "response_format")):
                response = await gateway.post(CHAT, {**BODIES[CHAT], **more, "stream": stream})
                assert (response.status_code, response.json()["error"]["param"]) == (400, field)
                assert "10.0.0.7" not in response.text
            assert gateway.calls.failure is None
            assert (await gateway.post(CHAT, BODIES[CHAT])).status_code == 200

    asyncio.run(main())
