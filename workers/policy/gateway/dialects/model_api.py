"""The parts common to all model APIs: requests as chat messages, completions as answers, and errors.

The trainer's own sampling parameters apply, as it trains on the log-probabilities of its policy. Of a client's
parameters only maximum length, stop texts and the form of the answer take effect; the others are recorded with the
call.

Log-probabilities are those of every sampled token, as recorded. The tokens' texts, joined, are the whole sampled text,
tool calls included. A token that is only part of a character has an empty text; the token that completes the character
has all of it. The end of a turn is a token without text.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import orjson

from farm.errors import FarmError
from farm.records.trajectory import Message
from workers.plugins.interfaces import Completion, Delta
from workers.policy.gateway.dialects.openai_answers import FinishReason
from workers.policy.generation import SpelledCompletion
from workers.policy.message_images import Content, PicturePart, joined

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageFunctionToolCallParam, ChatCompletionToolParam
    from openai.types.responses.response_output_text_param import Logprob
    from openai.types.shared_params import FunctionDefinition

_REQUESTED_PARAMS = frozenset(
    {
        *("model", "temperature", "top_p", "top_k", "min_p", "n", "seed", "logprobs", "top_logprobs", "logit_bias"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stop_sequences", "stream"),
        *("presence_penalty", "frequency_penalty", "response_format", "text", "tool_choice", "parallel_tool_calls"),
        *("reasoning", "reasoning_effort", "thinking", "output_config", "truncation", "verbosity"),
        *("maxOutputTokens", "stopSequences", "topP", "topK", "presencePenalty", "frequencyPenalty", "toolConfig"),
        *("responseMimeType", "responseSchema", "responseJsonSchema", "thinkingConfig"),
    }
)
_MAX_REQUESTED_PARAMS_BYTES = 10_000
_MAX_TEXTS = 64
_MAX_TEXT_CHARS = 1000
_MAX_LABELS = 32
_MAX_LABEL_CHARS = 200
_NEUTRAL: tuple[object, ...] = (None, False, "", [], {})
"""Values equivalent to omitting a field."""
_CUT: Mapping[str, FinishReason] = {"length": "length", "content_filter": "content_filter"}
NO_IMAGE = "images are supported only in user messages and tool results"
MAX_DEPTH = 200
"""A depth that can be encoded even if an answer wraps the value."""
_DEEPER = 20
"""Number of levels by which an answer may wrap a value."""
COMMENT = b": ping\n\n"
RAW = "malformed"
"""The key under which arguments that are not a JSON object are sent; the client's own validation rejects them."""


class BadRequest(FarmError):
    """A refused request; `param` is the faulty field, `details` are further fields that client libraries read."""

    def __init__(
        self, message: str, param: str = "", *, status: int = 400, details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.param = param
        self.status = status
        self.details = dict(details or {})


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One request of any API. `requested_params` are its sampling parameters, effective or not."""

    messages: list[Message]
    tools: list[ChatCompletionToolParam]
    model: str
    stream: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    requested_params: dict[str, Any]
    body: Mapping[str, Any]
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tools_allowed: tuple[str, ...] = ()
    """The tools that may be called; empty for all."""
    answer_schema: dict[str, Any] | None = None
    """The required JSON schema of the text."""
    logprobs: bool = False
    """True to return the log-probability of each token."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the request: its sender and purpose."""

    digest: bytes = b""
    """The hash of the body; equal for a retry."""
    is_retry: bool = False
    """True if the client declares the request a retry."""


@dataclass(frozen=True, slots=True)
class ApiProblem:
    """An error response: HTTP status, code, one sentence, and the delay of a retry, if one may help."""

    status: int
    code: str
    message: str
    param: str = ""
    retry_after_s: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


class Events(Protocol):
    """The encoded events of one streamed answer; its methods are called in the order of the stream."""

    def begin(self) -> bytes: ...

    def delta(self, delta: Delta) -> bytes: ...

    def ping(self) -> bytes:
        """Return an event without content, which prevents a timeout of the client."""
        ...

    def end(self, completion: Completion) -> bytes:
        """Return the part of the answer that was not yet sent as deltas, and the closing events."""
        ...

    def error(self, problem: ApiProblem) -> bytes:
        """Return the event for an error after the stream has begun."""
        ...


class Api(Protocol):
    """One model API for one rollout: it may remember its answers."""

    def parse(self, body: Any) -> ParsedRequest:
        """Return the parsed request, given its JSON object. Raises BadRequest.

        Implementations may annotate `body` with the vendor's type; they check every field that they read.
        """
        ...

    def answer(self, request: ParsedRequest, completion: Completion) -> Mapping[str, Any]: ...

    def events(self, request: ParsedRequest) -> Events: ...

    def problem(self, problem: ApiProblem) -> dict[str, Any]:
        """Return the body of an error."""
        ...

    def counted(self, n_tokens: int) -> Mapping[str, Any]:
        """Return the answer to a request to count a conversation's tokens."""
        ...


@dataclass(frozen=True, slots=True)
class AnsweredToolCall:
    """A tool call of an answer; `namespace` is that of its tool, if the API has namespaces."""

    call_id: str
    name: str
    arguments: str
    namespace: str = ""


def calls(message: Message) -> list[AnsweredToolCall]:
    """Return the tool calls of an assistant message; a missing name or text becomes empty."""
    calls_of_message = []
    for each in message.get("tool_calls") or []:
        function = each.get("function") or {}
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode()
        calls_of_message.append(
            AnsweredToolCall(str(each.get("id") or new_id("call")), str(function.get("name") or ""), text)
        )
    return calls_of_message


def digest_of(body: Mapping[str, Any]) -> bytes:
    """Return the hash of a request's body, or of a message."""
    return hashlib.blake2b(orjson.dumps(body, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def content(message: Message) -> str:
    value = message.get("content")
    return value if isinstance(value, str) else ""


def reasoning(message: Message) -> str:
    value = message.get("reasoning_content")
    return value if isinstance(value, str) else ""


def finish_reason(completion: Completion) -> FinishReason:
    """Return the chat API's finish reason."""
    return _CUT.get(completion.finish_reason) or ("tool_calls" if completion.response.get("tool_calls") else "stop")


def stop_text(completion: Completion, request: ParsedRequest) -> str | None:
    """Return the client's stop text that ended the answer, if one did."""
    reason = completion.stop_reason
    return reason if isinstance(reason, str) and reason in request.stop else None


def rest(whole: str, sent: str) -> str:
    """Return the unsent part of a text; empty if the sent part is not a prefix of it."""
    return whole[len(sent) :] if whole.startswith(sent) else ""


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def requested_params(
    body: Mapping[str, Any], left_out: Sequence[str] = (), unknown: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the sampling parameters of a request, the tools hidden from the policy, and unknown fields."""
    params = {name: body[name] for name in _REQUESTED_PARAMS & body.keys() if body[name] is not None}
    small = {name: value for name, value in params.items() if len(orjson.dumps(value)) <= _MAX_REQUESTED_PARAMS_BYTES}
    for name, values in (("tools_left_out", left_out), ("unknown_fields", unknown)):
        if values:
            small[name] = [each[:_MAX_TEXT_CHARS] for each in values[:_MAX_TEXTS]]
    return small


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%sdata: %s\n\n" % (head, orjson.dumps(data))


def writable(value: object) -> bool:
    """Return whether a value can be encoded in an answer: false if nested some hundreds of levels deep."""
    for _ in range(_DEEPER):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return False
    return True


def argument_object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, as some APIs require."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) and writable(value) else {RAW: arguments}


def flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise BadRequest("must be true or false", name)


def refuse(body: Mapping[str, Any], reasons: Mapping[str, str], path: str = "") -> None:
    """Raise BadRequest for an unsupported field that would change the conversation or the answer.

    If it were ignored, the policy would answer another request than the client's.
    """
    for name, reason in reasons.items():
        if body.get(name) not in _NEUTRAL:
            raise BadRequest(reason, f"{path}.{name}" if path else name)


def labels(body: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels in a request's body: the model, user and agent that it names."""
    metadata = body.get("metadata")
    fields = metadata if isinstance(metadata, dict) else {}
    # Its own fields come first, so that metadata cannot crowd them out.
    named = {name: body.get(name) for name in ("model", "user", "safety_identifier")}
    named |= {str(name)[:64]: value for name, value in fields.items() if name not in named}
    texts = [(name, value) for name, value in named.items() if isinstance(value, str) and value]
    return {name: value[:_MAX_LABEL_CHARS] for name, value in texts[:_MAX_LABELS]}


def conversation(messages: list[Message], name: str) -> list[Message]:
    """Return the messages of a request. Raises BadRequest if there are none."""
    if not messages:
        raise BadRequest("no message to answer", name)
    return messages


def count(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of the fields that is set: a number of tokens, at least 1. Raises BadRequest."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest("must be a whole number, at least 1", name)
        return value
    return None


def texts(value: object, name: str) -> tuple[str, ...]:
    """Return stop texts, given as one text or a list; empty ones are dropped. Raises BadRequest."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise BadRequest("must be a text or a list of texts", name)
    if len(stops) > _MAX_TEXTS or any(len(each) > _MAX_TEXT_CHARS for each in stops):
        raise BadRequest(f"at most {_MAX_TEXTS} texts of {_MAX_TEXT_CHARS} characters are supported", name)
    return tuple(each for each in stops if each)


def word(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise BadRequest("must be a text", name)
    return value


def mappings(value: object, name: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise BadRequest("must be a list of objects", name)
    return value


def plain(value: object, name: str, kinds: Collection[str] = ("text",)) -> str:
    """Return the text of a content: a text, a list of parts of these kinds, or nothing. Raises BadRequest for others.

    Parts are joined by line breaks, as chat templates expect one text.
    """
    if value is None or isinstance(value, str):
        return value or ""
    parts = [_text_part(part, f"{name}[{number}]", kinds) for number, part in enumerate(mappings(value, name))]
    return "\n".join(parts)


def shown(value: object, name: str, kinds: Collection[str] = ("text",)) -> Content:
    """Return a user message's or tool result's content: a text, or parts if it has images. Raises BadRequest."""
    if not isinstance(value, list) or not any(isinstance(part, PicturePart) for part in value):
        return plain(value, name, kinds)
    parts: list[Content] = [
        [part] if isinstance(part, PicturePart) else _text_part(part, f"{name}[{number}]", kinds)
        for number, part in enumerate(mappings(value, name))
    ]
    return joined(parts, "\n")


def _text_part(part: Mapping[str, Any], name: str, kinds: Collection[str]) -> str:
    if isinstance(part, PicturePart):
        raise BadRequest(NO_IMAGE, name)
    if part.get("type") not in kinds:
        raise BadRequest(f"content of type {part.get('type')!r} is not supported: only text is", name)
    return word(part.get("text"), f"{name}.text")


def schema(value: object, name: str) -> dict[str, Any] | None:
    """Return the schema of a tool's arguments; None if it has none. Raises BadRequest."""
    if not isinstance(value, dict | None):
        raise BadRequest("must be an object", name)
    return value


def function(name: str, description: object, parameters: dict[str, Any] | None) -> ChatCompletionToolParam:
    """Return a tool in the form of the chat API."""
    definition: FunctionDefinition = {"name": name}
    if isinstance(description, str) and description:
        definition["description"] = description
    definition["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": definition}


def function_tools(value: object, *, flat: bool) -> tuple[list[ChatCompletionToolParam], list[str]]:
    """Return the function tools of OpenAI's APIs, and the types of tools that run only on the vendor's servers.

    `flat`: a function's fields are next to its type, not in a nested object. Raises BadRequest.
    """
    tools, left_out = [], []
    for number, tool in enumerate(mappings(value or [], "tools")):
        called, path = (tool, f"tools[{number}]") if flat else (tool.get("function"), f"tools[{number}].function")
        if tool.get("type") == "function" and isinstance(called, dict):
            name = word(called.get("name"), f"{path}.name")
            parameters = schema(called.get("parameters"), f"{path}.parameters")
            tools.append(function(name, called.get("description"), parameters))
        else:
            left_out.append(str(tool.get("type")))
    return tools, left_out


def assistant(text: str, thought: str, tool_calls: Sequence[AnsweredToolCall]) -> Message:
    """Return an assistant message in the policy's own form."""
    message: Message = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if tool_calls:
        message["tool_calls"] = [tool_call(each) for each in tool_calls]
    return message


def tool_call(call: AnsweredToolCall) -> ChatCompletionMessageFunctionToolCallParam:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def of_openai(completion: Completion) -> list[Logprob]:
    """Return them in the form of both OpenAI APIs; empty if they were not requested."""
    return [
        {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}
        for text, _, logprob in _tokens(completion)
    ]


def of_google(completion: Completion) -> dict[str, Any]:
    """Return the fields of a candidate; empty if they were not requested."""
    tokens = list(_tokens(completion))
    if not tokens:
        return {}
    chosen = [{"token": text, "tokenId": number, "logProbability": logprob} for text, number, logprob in tokens]
    mean = sum(logprob for *_, logprob in tokens) / len(tokens)
    return {"logprobsResult": {"chosenCandidates": chosen, "topCandidates": []}, "avgLogprobs": mean}


def _tokens(completion: Completion) -> Iterator[tuple[str, int, float]]:
    ids, logprobs = completion.response_ids, completion.response_logprobs
    if isinstance(completion, SpelledCompletion) and ids is not None and logprobs is not None:
        yield from zip(completion.token_texts, map(int, ids), map(float, logprobs), strict=True)
