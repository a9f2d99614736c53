"""What the model APIs have in common here: a request as chat messages, an answer made of a completion, a problem told.

The trainer's own sampling parameters rule what is sampled, as the log-probabilities that it trains on must be those of
its policy. Of a client's wishes only the length of the answer and the texts that end it are heeded; the others are
written down with the call.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from farm.errors import FarmError
from farm.trajectory import Message
from workers.interfaces import Completion, Delta

_WISHES = frozenset(
    {
        *("model", "temperature", "top_p", "top_k", "min_p", "n", "seed", "logprobs", "top_logprobs", "logit_bias"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stop_sequences", "stream"),
        *("presence_penalty", "frequency_penalty", "response_format", "text", "tool_choice", "parallel_tool_calls"),
        *("reasoning", "reasoning_effort", "thinking", "output_config", "truncation", "verbosity"),
    }
)
_MAX_WISH_BYTES = 10_000
_MAX_TEXTS = 64
_MAX_TEXT_CHARS = 1000
_DEEPER = 20
"""By how many levels an answer may wrap what it is made of."""


class BadRequest(FarmError):
    """The request cannot be understood; `param` is the field at fault."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, whichever API it came by. `wishes` are what it says of sampling, heeded or not."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    model: str
    stream: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    wishes: dict[str, Any]
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """Why there is no answer: an HTTP status, a code, one sentence, and when to try again, if that may help."""

    status: int
    code: str
    message: str
    param: str = ""
    retry_after_s: int | None = None


class Events(Protocol):
    """The pieces of one streamed answer, in the order in which they are asked for, ready to be sent."""

    def begin(self) -> bytes: ...

    def delta(self, delta: Delta) -> bytes: ...

    def ping(self) -> bytes:
        """Says nothing, so that a client does not take silence for a lost connection."""
        ...

    def end(self, completion: Completion) -> bytes:
        """What of the answer was not sent as deltas, and the closing events."""
        ...

    def error(self, problem: Problem) -> bytes:
        """For a problem that comes after the beginning."""
        ...


class Api(Protocol):
    """One model API, for one rollout: it may remember what it answered."""

    def asked(self, body: Mapping[str, Any]) -> Asked:
        """Raises BadRequest."""
        ...

    def answer(self, asked: Asked, completion: Completion) -> dict[str, Any]: ...

    def events(self, asked: Asked) -> Events: ...

    def problem(self, problem: Problem) -> dict[str, Any]:
        """The body of an error."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of an answer."""

    call_id: str
    name: str
    arguments: str


def calls(message: Message) -> list[Call]:
    """The tool calls of an assistant message; a missing name or text is empty."""
    found = []
    for each in message.get("tool_calls") or []:
        function = each.get("function") or {}
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode()
        found.append(Call(str(each.get("id") or new_id("call")), str(function.get("name") or ""), text))
    return found


def content(message: Message) -> str:
    found = message.get("content")
    return found if isinstance(found, str) else ""


def reasoning(message: Message) -> str:
    found = message.get("reasoning_content")
    return found if isinstance(found, str) else ""


def finish_reason(completion: Completion) -> str:
    """As the chat API says it: stop, length, tool_calls or content_filter."""
    if completion.finish_reason in ("length", "content_filter"):
        return completion.finish_reason
    return "tool_calls" if completion.message.get("tool_calls") else "stop"


def stop_text(completion: Completion, asked: Asked) -> str | None:
    """The client's own stop text that ended the answer, if one did."""
    reason = completion.stop_reason
    return reason if isinstance(reason, str) and reason in asked.stop else None


def rest(whole: str, sent: str) -> str:
    """What is still to be sent of a text. Nothing if something else was sent, which cannot be taken back."""
    return whole[len(sent) :] if whole.startswith(sent) else ""


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def wishes(body: Mapping[str, Any], left_out: Sequence[str] = ()) -> dict[str, Any]:
    """What a request says of sampling; `left_out` are tools that the policy is not shown."""
    found = {name: body[name] for name in _WISHES & body.keys() if body[name] is not None}
    small = {name: value for name, value in found.items() if len(orjson.dumps(value)) <= _MAX_WISH_BYTES}
    named = [name[:_MAX_TEXT_CHARS] for name in left_out[:_MAX_TEXTS]]
    return {**small, "tools_left_out": named} if named else small


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%sdata: %s\n\n" % (head, orjson.dumps(data))


COMMENT = b": ping\n\n"


def writable(value: object) -> bool:
    """Whether it can be written in an answer: not if it is nested some hundreds of levels deep, as it may be read."""
    for _ in range(_DEEPER):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return False
    return True


def flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise BadRequest("must be true or false", name)


def count(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of the fields that is given; a number of tokens, at least 1."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest("must be a whole number, at least 1", name)
        return value
    return None


def texts(value: object, name: str) -> tuple[str, ...]:
    """One text or a list of texts; empty ones end nothing."""
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise BadRequest("must be a text or a list of texts", name)
    if len(found) > _MAX_TEXTS or any(len(each) > _MAX_TEXT_CHARS for each in found):
        raise BadRequest(f"may be {_MAX_TEXTS} texts of {_MAX_TEXT_CHARS} characters", name)
    return tuple(each for each in found if each)


def word(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise BadRequest("must be a text", name)
    return value


def mappings(value: object, name: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise BadRequest("must be a list of objects", name)
    return value


def plain(value: object, name: str, kinds: Collection[str] = ("text",)) -> str:
    """The text of a content that is a text, a list of parts of these kinds, or nothing. Raises BadRequest for others.

    Parts are joined by line breaks, as chat templates take one text.
    """
    if value is None or isinstance(value, str):
        return value or ""
    parts = []
    for number, part in enumerate(mappings(value, name)):
        if part.get("type") not in kinds:
            raise BadRequest(f"content of type {part.get('type')!r} is not taken: only text is", f"{name}[{number}]")
        parts.append(word(part.get("text"), f"{name}[{number}].text"))
    return "\n".join(parts)


def function(name: str, description: object, parameters: object) -> dict[str, Any]:
    """A tool as the chat API describes it."""
    described = {"description": description} if isinstance(description, str) and description else {}
    schema = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def assistant(text: str, thought: str, tool_calls: Sequence[Call]) -> Message:
    """An assistant message, in the form in which the policy gives it."""
    message: Message = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if tool_calls:
        message["tool_calls"] = [tool_call(each) for each in tool_calls]
    return message


def tool_call(call: Call) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
