"""Strategies for requests of the four APIs, from the types of the vendors' clients, with some values wrong."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import pydantic
import typing_extensions
from hypothesis import strategies as st

Body = dict[str, Any]
_DEPTH = 4
_TEXTS = st.sampled_from(["", "a", "look", "hello there", "é\u2028", "\x00", "\ud800", "<tool_call>", "{", "x" * 300])
_LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), _TEXTS)
RUBBISH: st.SearchStrategy[Any] = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3), max_leaves=6
)
HELLO = {"role": "user", "content": "hello"}


def of_type(hint: Any, depth: int = _DEPTH) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a client's type, as JSON."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated):
        return of_type(args[0], depth)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(of_type(each, depth) for each in args))
    if origin is typing.Literal:
        return st.sampled_from(args)
    if hint is None or hint is type(None):
        return st.none()
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from([each.value for each in hint])
    if hint in _PLAIN:
        return _PLAIN[hint]
    if depth <= 0:
        return RUBBISH
    if typing_extensions.is_typeddict(hint):
        return _typed_dict(hint, depth)
    if isinstance(hint, type) and issubclass(hint, pydantic.BaseModel):
        fields = {each.alias or name: each.annotation for name, each in hint.model_fields.items()}
        optional = {name: st.deferred(_later(kind, depth)) for name, kind in fields.items()}
        return st.fixed_dictionaries({}, optional=optional).map(_few)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(_TEXTS, RUBBISH, max_size=2)
    if args:
        return st.lists(of_type(args[0], depth - 1), max_size=2)
    return RUBBISH


_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: _TEXTS,
    bool: st.booleans(),
    int: st.integers(-2, 9),
    float: st.floats(-2, 2),
    bytes: st.just("aGk="),
}


def _typed_dict(hint: Any, depth: int) -> st.SearchStrategy[Any]:
    hints = typing_extensions.get_type_hints(hint)
    required = {name: st.deferred(_later(hints[name], depth)) for name in hint.__required_keys__}
    optional = {name: st.deferred(_later(hints[name], depth)) for name in hint.__optional_keys__}
    return st.builds(lambda whole, more: {**_few(more), **whole}, st.fixed_dictionaries(required), _some(optional))


def _some(optional: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Body]:
    """Return a strategy for at most three of the fields."""
    if not optional:
        return st.just({})
    names = st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: optional[name] for name in chosen}))


def _few(fields: Mapping[str, Any]) -> Body:
    return dict(list(fields.items())[:3])


def _later(hint: Any, depth: int) -> Callable[[], st.SearchStrategy[Any]]:
    return lambda: of_type(hint, depth - 1)


def _spoilt(body: st.SearchStrategy[Body]) -> st.SearchStrategy[Body]:
    """Return a strategy for bodies in which one field in four has a value of any kind."""

    def with_garbage(given: tuple[Body, str, Any, int]) -> Body:
        whole, name, rubbish, roll = given
        return whole if roll else {**whole, (name if name in whole else next(iter(whole), name)): rubbish}

    names = st.sampled_from(["messages", "input", "contents", "tools", "tool_choice", "stream", "generationConfig"])
    return st.tuples(body, names, RUBBISH, st.integers(0, 3)).map(with_garbage)


def _request(base: Any, field: str, member: Any, simple: Any) -> st.SearchStrategy[Body]:
    hints = typing_extensions.get_type_hints(base)
    optional = {name: of_type(kind) for name, kind in hints.items() if name != field}
    # most conversations are plain; otherwise nearly every request would be refused for its first message
    conversation = st.just([simple]) | st.lists(st.just(simple) | of_type(member), min_size=1, max_size=3)
    return _spoilt(st.builds(lambda more, said: {**more, field: said}, _some(optional), conversation))


def chat() -> st.SearchStrategy[Body]:
    """Requests of OpenAI's Chat Completions."""
    from openai.types.chat import ChatCompletionMessageParam
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase

    return _request(CompletionCreateParamsBase, "messages", ChatCompletionMessageParam, HELLO)


def responses() -> st.SearchStrategy[Body]:
    """Requests of OpenAI's Responses."""
    from openai.types.responses.response_create_params import ResponseCreateParamsBase
    from openai.types.responses.response_input_param import ResponseInputItemParam

    return _request(ResponseCreateParamsBase, "input", ResponseInputItemParam, HELLO)


def messages() -> st.SearchStrategy[Body]:
    """Requests of Anthropic's Messages."""
    from anthropic.types.beta import BetaMessageParam
    from anthropic.types.beta.message_create_params import MessageCreateParamsBase

    return _request(MessageCreateParamsBase, "messages", BetaMessageParam, HELLO)


def google() -> st.SearchStrategy[Body]:
    """Requests of Google's generateContent."""
    from google.genai import types as google_types

    config = of_type(google_types.GenerationConfig)
    content = of_type(google_types.Content) | st.just({"role": "user", "parts": [{"text": "hello"}]})
    more = {
        "generationConfig": config,
        "tools": st.lists(of_type(google_types.Tool), max_size=2),
        "toolConfig": of_type(google_types.ToolConfig),
        "systemInstruction": content,
        "safetySettings": RUBBISH,
    }
    conversation = st.lists(content, min_size=1, max_size=3)
    return _spoilt(st.builds(lambda fields, said: {**fields, "contents": said}, _some(more), conversation))


REQUESTS: dict[str, Callable[[], st.SearchStrategy[Body]]] = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/v1beta/models/m:generateContent": google,
}
"""Built when a test runs: importing the vendors' types takes seconds."""
