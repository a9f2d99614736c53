"""Answers validate as the official clients' own types: all required fields, and no unknown ones."""

from __future__ import annotations

import asyncio
import functools
import json
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

import pydantic
import pytest
from pydantic import TypeAdapter

from tests.unit.workers.policy.gateway.serving import Playing, Served, served, thinking
from workers.plugins.interfaces import Completion
from workers.policy.gateway.dialects import openai_answers as answers
from workers.testing import answering, calling

HELLO = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object"}
LOOK = {"name": "look", "parameters": SCHEMA}
CHAT: dict[str, Any] = {"model": "m", "messages": [HELLO], "tools": [{"type": "function", "function": LOOK}]}
RESPONSES: dict[str, Any] = {"model": "m", "input": "hello", "tools": [{"type": "function", "strict": False, **LOOK}]}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 99,
    "messages": [HELLO],
    "tools": [{"name": "look", "input_schema": SCHEMA}],
    "thinking": {"type": "enabled", "budget_tokens": 9},
}
GOOGLE: dict[str, Any] = {
    "contents": "hello",
    "tools": [{"functionDeclarations": [{"name": "look"}]}],
    "generationConfig": {"thinkingConfig": {"includeThoughts": True}, "responseLogprobs": True},
}
MORE = {"reasoning_content", "store", "name"}
"""Fields outside the types: reasoning as servers of open models write it, and fields that the service itself sends."""
COMPLETIONS: dict[str, Callable[[], Completion]] = {
    "text": lambda: answering("yes"),
    "calls": lambda: calling(("look", {"a": 1}), ("look", "{no json"), content="I look."),
    "a thought": lambda: thinking("hm", answering("yes")),
    "a thought and a call": lambda: thinking("hm", calling(("look", {"a": 1}))),
}


def unknown(value: Any) -> Iterator[str]:
    """Return the names of fields that a type does not know, at any depth."""
    if isinstance(value, pydantic.BaseModel):
        yield from value.__pydantic_extra__ or {}
        for name in type(value).model_fields:
            yield from unknown(getattr(value, name, None))
    for each in value if isinstance(value, list) else ():
        yield from unknown(each)


@functools.cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the validator of a type; building one takes longer than a test's calls."""
    return TypeAdapter(kind)


def check(kind: Any, data: Any) -> None:
    value = adapter(kind).validate_python(data)
    assert set(unknown(value)) <= MORE, data


async def whole(gateway: Served) -> None:
    from anthropic.types import Message, MessageTokensCount
    from anthropic.types.beta import BetaMessage
    from google.genai.types import CountTokensResponse, GenerateContentResponse
    from openai.types.chat import ChatCompletion
    from openai.types.responses import Response
    from openai.types.responses.input_token_count_response import InputTokenCountResponse

    for path, body, kind in (
        ("/v1/chat/completions", CHAT, ChatCompletion),
        ("/v1/chat/completions", {**CHAT, "logprobs": True}, ChatCompletion),
        ("/v1/responses", RESPONSES, Response),
        ("/v1/responses/input_tokens", RESPONSES, InputTokenCountResponse),
        ("/v1/messages", MESSAGES, Message),
        ("/v1/messages", MESSAGES, BetaMessage),
        ("/v1/messages/count_tokens", MESSAGES, MessageTokensCount),
        ("/v1beta/models/m:generateContent", GOOGLE, GenerateContentResponse),
        ("/v1beta/models/m:countTokens", {"contents": "hello"}, CountTokensResponse),
    ):
        response = await gateway.post(path, body)
        assert response.status_code == 200, response.text
        check(kind, response.json())


async def streamed(gateway: Served) -> None:
    from anthropic.types import RawMessageStreamEvent
    from anthropic.types.beta import BetaRawMessageStreamEvent
    from google.genai.types import GenerateContentResponse
    from openai.types.chat import ChatCompletionChunk
    from openai.types.responses import ResponseStreamEvent

    usage = {"stream": True, "stream_options": {"include_usage": True}}
    for path, body, kinds in (
        ("/v1/chat/completions", CHAT | usage, [ChatCompletionChunk]),
        ("/v1/responses", RESPONSES | {"stream": True}, [ResponseStreamEvent]),
        ("/v1/messages", MESSAGES | {"stream": True}, [RawMessageStreamEvent, BetaRawMessageStreamEvent]),
        ("/v1beta/models/m:streamGenerateContent?alt=sse", GOOGLE, [GenerateContentResponse]),
    ):
        for name, data in await gateway.events(path, body):
            for kind in kinds if name not in (":", "ping") and data != "[DONE]" else ():
                check(kind, json.loads(data))


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("completion", COMPLETIONS.values(), ids=COMPLETIONS)
def test_answers_validate_as_client_types(completion: Callable[[], Completion], ask: Callable[[Served], Any]) -> None:
    async def main() -> None:
        async with served(Playing(answer=lambda _: completion()), max_turns=99) as gateway:
            await ask(gateway)

    asyncio.run(main())


def test_model_entry_has_the_fields_of_all_apis() -> None:
    from anthropic.types import ModelInfo
    from openai.types import Model

    async def main() -> None:
        async with served(Playing()) as gateway:
            listed = (await gateway.http.get(f"{gateway.url}/v1/models")).json()
            for each in (*listed["data"], (await gateway.http.get(f"{gateway.url}/v1/models/policy")).json()):
                adapter(Model).validate_python(each)
                adapter(ModelInfo).validate_python(each)

    asyncio.run(main())


def openai_classes() -> dict[type[Any], type[pydantic.BaseModel]]:
    """Return the class of `openai` for each TypedDict of an answer."""
    from openai.types import CompletionUsage, Model, chat, completion_usage, responses, shared
    from openai.types.chat import chat_completion, chat_completion_chunk
    from openai.types.responses import input_token_count_response, response, response_usage

    return {
        answers.ErrorObjectDict: shared.ErrorObject,
        answers.ModelDict: Model,
        answers.PromptTokensDetailsDict: completion_usage.PromptTokensDetails,
        answers.CompletionTokensDetailsDict: completion_usage.CompletionTokensDetails,
        answers.CompletionUsageDict: CompletionUsage,
        answers.ChoiceLogprobsDict: chat_completion.ChoiceLogprobs,
        answers.ChatCompletionMessageDict: chat.ChatCompletionMessage,
        answers.ChoiceDict: chat_completion.Choice,
        answers.ChatCompletionDict: chat.ChatCompletion,
        answers.ChoiceDeltaToolCallDict: chat_completion_chunk.ChoiceDeltaToolCall,
        answers.ChoiceDeltaDict: chat_completion_chunk.ChoiceDelta,
        answers.ChunkChoiceDict: chat_completion_chunk.Choice,
        answers.ChatCompletionChunkDict: chat.ChatCompletionChunk,
        answers.ResponseErrorDict: responses.ResponseError,
        answers.IncompleteDetailsDict: response.IncompleteDetails,
        answers.InputTokensDetailsDict: response_usage.InputTokensDetails,
        answers.OutputTokensDetailsDict: response_usage.OutputTokensDetails,
        answers.ResponseUsageDict: responses.ResponseUsage,
        answers.ResponseDict: responses.Response,
        answers.InputTokenCountResponseDict: input_token_count_response.InputTokenCountResponse,
    }


def literals(hint: Any) -> Iterator[Any]:
    """Return the values of a type's literals, also within a union."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif hint is type(None):
        yield None
    elif isinstance(hint, types.UnionType) or get_origin(hint) is Union:
        for each in get_args(hint):
            yield from literals(each)


def test_typed_dicts_of_answers_match_the_openai_classes() -> None:
    from openai.types import chat, responses
    from openai.types.chat.chat_completion_message_function_tool_call_param import Function
    from openai.types.responses.response_output_text_param import Logprob

    names = {**vars(chat), **vars(responses), "Function": Function, "Logprob": Logprob}
    classes = openai_classes()
    assert {each for each in vars(answers).values() if is_typeddict(each)} == classes.keys()
    for sent, known in classes.items():
        hints = get_type_hints(sent, localns=names, include_extras=True)
        always = {name for name, hint in hints.items() if get_origin(hint) is not NotRequired}
        assert always >= {name for name, field in known.model_fields.items() if field.is_required()}, known
        assert hints.keys() <= known.model_fields.keys() | MORE, known
        for name, hint in get_type_hints(sent, localns=names).items():
            kind: Any = known.model_fields[name].annotation if name in known.model_fields else Any
            for value in literals(hint):
                TypeAdapter(kind).validate_python(value)
