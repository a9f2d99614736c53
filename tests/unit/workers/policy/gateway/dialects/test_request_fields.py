"""Every field of the official clients' request types is handled, refused, or ignored for a reason in a table.

The types are those of the installed packages: this test fails on new fields of a new version.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import typing_extensions

from tests.unit.workers.policy.gateway.serving import Playing, served
from workers.policy.gateway.dialects import request_fields as tables
from workers.policy.gateway.dialects.anthropic_messages import MessagesApi
from workers.policy.gateway.dialects.chat_completions import ChatApi
from workers.policy.gateway.dialects.model_api import Api, BadRequest
from workers.policy.gateway.dialects.request_fields import RequestFields
from workers.policy.gateway.dialects.responses import ResponsesApi
from workers.testing import answering

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
GOOGLE_PATH = "/v1beta/models/m:generateContent"
HELLO = {"role": "user", "content": "hello"}


def names_of(kind: Any) -> set[str]:
    return set(kind.__required_keys__ | kind.__optional_keys__)


def members(union: Any) -> Iterator[Any]:
    """Return the dictionaries of a union, at any depth."""
    for each in typing.get_args(union):
        if typing_extensions.is_typeddict(each):
            yield each
        else:
            yield from members(each)


def kind_of(member: Any) -> str:
    hint = typing_extensions.get_type_hints(member).get("type")
    return str(typing.get_args(hint)[0]) if typing.get_args(hint) else ""


def google_names(kind: Any) -> set[str]:
    return {each.alias or name for name, each in kind.model_fields.items()}


OF_THE_CLIENT = {"httpOptions", "shouldReturnHttpResponse", "automaticFunctionCalling", "automaticContinuation"}
"""Options that Google's client accepts in addition to the request's, and does not send."""
BESIDE_THE_CONFIG = {"systemInstruction", "tools", "toolConfig", "labels", "cachedContent", "safetySettings"} | {
    *("serviceTier", "modelArmorConfig", "continuationToken", "store")
}
"""Options of Google's client that it writes outside `generationConfig`."""
TABLES: dict[str, RequestFields] = {
    "chat": tables.CHAT,
    "responses": tables.RESPONSES,
    "messages": tables.MESSAGES,
    "google": tables.GOOGLE,
    "google config": tables.GOOGLE_CONFIG,
    "google part": tables.GOOGLE_PART,
    "chat message": tables.CHAT_MESSAGE,
    "messages message": tables.MESSAGE,
}


@cache
def top() -> dict[str, set[str]]:
    """Return the fields of the vendors' types, by the names of the tables."""
    from anthropic.types.beta import BetaMessageParam
    from anthropic.types.beta.message_create_params import MessageCreateParamsStreaming as BetaMessageCreate
    from anthropic.types.message_create_params import MessageCreateParamsStreaming as MessageCreate
    from google.genai import types as google_types
    from openai.types.chat.chat_completion_message_param import ChatCompletionMessageParam
    from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
    from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

    config = google_names(google_types.GenerateContentConfig) | google_names(google_types.GenerationConfig)
    return {
        "chat": names_of(CompletionCreateParamsStreaming),
        "responses": names_of(ResponseCreateParamsStreaming),
        "messages": names_of(MessageCreate) | names_of(BetaMessageCreate),
        "google": {"contents", "generationConfig", *BESIDE_THE_CONFIG},
        "google config": config - OF_THE_CLIENT - BESIDE_THE_CONFIG,
        "google part": google_names(google_types.Part),
        "chat message": set[str]().union(*(names_of(each) for each in members(ChatCompletionMessageParam))),
        "messages message": set[str]().union(*(names_of(each) for each in members(BetaMessageParam))),
    }


def items_and_blocks() -> tuple[list[Any], list[Any]]:
    """Return the types of items of the Responses API, and of blocks of Anthropic's."""
    from anthropic.types.beta.beta_content_block_param import BetaContentBlockParam
    from openai.types.responses.response_input_param import ResponseInputItemParam

    return list(members(ResponseInputItemParam)), list(members(BetaContentBlockParam))


ITEMS = {"message", "function_call", "function_call_output", "reasoning"}
BLOCKS = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result"}


@pytest.mark.parametrize("name", TABLES)
def test_every_field_is_in_a_table(name: str) -> None:
    table, fields = TABLES[name], top()[name]
    known = table.handled | table.refused.keys() | table.ignored.keys()
    assert fields - known == set(), "decide each: handled, refused or ignored, and why"


def test_every_field_of_a_supported_item_or_block_is_in_a_table() -> None:
    items, blocks = items_and_blocks()
    for table, kinds, taken in ((tables.ITEM, items, ITEMS), (tables.BLOCK, blocks, BLOCKS)):
        known = table.handled | table.refused.keys() | table.ignored.keys()
        for member in kinds:
            if (kind_of(member) or "message") in taken:
                assert names_of(member) - known == set(), member.__name__


def test_no_field_is_in_two_tables() -> None:
    for name, table in inspect.getmembers(tables, lambda value: isinstance(value, RequestFields)):
        both = table.handled & table.ignored.keys() | table.refused.keys() & (table.handled | table.ignored.keys())
        assert both == set(), name
        assert all(len(reason) > 10 for reason in (*table.refused.values(), *table.ignored.values()))


class Reading(dict[str, Any]):
    """A body that records which of its fields were read."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize(
    ("api", "table", "field"),
    [
        (ChatApi, tables.CHAT, "messages"),
        (ResponsesApi, tables.RESPONSES, "input"),
        (MessagesApi, tables.MESSAGES, "messages"),
    ],
)
def test_handled_fields_are_read(api: Callable[[], Api], table: RequestFields, field: str) -> None:
    body = Reading({field: [HELLO]})
    served_by = api()
    asked = served_by.parse(body)
    served_by.events(asked).begin()
    served_by.answer(asked, answering("yes"))
    assert table.handled - body.read == set()


REFUSED = [(name, field) for name in PATHS for field in TABLES[name].refused]


@pytest.mark.parametrize(("name", "field"), REFUSED)
def test_refused_field_is_named(name: str, field: str) -> None:
    kinds: dict[str, Callable[[], Api]] = {"chat": ChatApi, "responses": ResponsesApi, "messages": MessagesApi}
    api = kinds[name]()
    conversation = {"input" if name == "responses" else "messages": [HELLO]}
    with pytest.raises(BadRequest, match=f"^{field}: ") as raised:
        api.parse({**conversation, field: {"some": "thing"}})
    assert raised.value.param == field
    api.parse({**conversation, field: None})


def posted(cases: Mapping[str, tuple[str, dict[str, Any]]]) -> dict[str, tuple[int, str]]:
    """Return status and text of each request, all sent to one gateway."""

    async def main() -> dict[str, tuple[int, str]]:
        result = {}
        async with served(Playing(answer=lambda _: answering("yes")), max_turns=10_000) as gateway:
            for name, (path, body) in cases.items():
                response = await gateway.post(path, body)
                result[name] = (response.status_code, response.text)
        return result

    return asyncio.run(main())


def test_every_other_kind_of_item_part_or_block_is_refused() -> None:
    from openai.types.chat.chat_completion_content_part_param import ChatCompletionContentPartParam

    items, blocks = items_and_blocks()
    cases: dict[str, tuple[str, dict[str, Any]]] = {}
    for member in items:
        if (kind := kind_of(member)) and kind not in ITEMS:
            cases[f"item {kind}"] = (PATHS["responses"], {"input": [HELLO, {"type": kind}]})
    for member in blocks:
        if (kind := kind_of(member)) not in BLOCKS:
            for role in ("user", "assistant"):
                said = {"role": role, "content": [{"type": kind}]}
                cases[f"{role} {kind}"] = (PATHS["messages"], {"messages": [HELLO, said]})
    for member in members(ChatCompletionContentPartParam):
        if (kind := kind_of(member)) != "text":
            cases[f"part {kind}"] = (PATHS["chat"], {"messages": [{"role": "user", "content": [{"type": kind}]}]})
    for field in tables.GOOGLE_PART.refused:
        cases[f"google {field}"] = (GOOGLE_PATH, {"contents": [{"parts": [{field: {"a": "b"}}]}]})
    for name, (status, text) in posted(cases).items():
        assert status == 400, (name, text)
        assert name.split()[-1] in text, (name, text)
    assert len(cases) > 60


def test_tools_of_other_kinds_are_omitted_by_name_and_never_chosen() -> None:
    from openai.types.responses.tool_param import ToolParam

    kinds = {kind_of(member) for member in members(ToolParam)} - {"", "function", "namespace"}
    function = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    cases: dict[str, tuple[str, dict[str, Any]]] = {}
    for kind in kinds:
        body = {"input": "hello", "tools": [function, {"type": kind}]}
        cases[f"with a function: {kind}"] = (PATHS["responses"], body)
        cases[f"alone: {kind}"] = (PATHS["responses"], {**body, "tools": [{"type": kind}]})
        cases[f"chosen: {kind}"] = (PATHS["responses"], {**body, "tool_choice": {"type": kind}})
    for name, (status, text) in posted(cases).items():
        assert status == (200 if name.startswith("with a function") else 400), (name, text)
    assert len(kinds) > 8


def test_unknown_field_is_recorded() -> None:
    async def main() -> None:
        async with served(Playing(answer=lambda _: answering("yes"))) as gateway:
            for path, body in (
                (PATHS["chat"], {"messages": [HELLO]}),
                (PATHS["responses"], {"input": "hello"}),
                (PATHS["messages"], {"messages": [HELLO]}),
                (GOOGLE_PATH, {"contents": "hello"}),
            ):
                response = await gateway.post(path, {**body, "enable_thinking": True})
                assert response.status_code == 200, response.text
            recorded = [call.sampling["asked"]["unknown_fields"] for call in gateway.records.calls]
            assert recorded == [*[["enable_thinking"]] * 3, ["enableThinking"]]

    asyncio.run(main())
