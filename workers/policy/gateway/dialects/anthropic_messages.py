"""Anthropic's messages, `POST /v1/messages`: content in blocks, tool calls as objects instead of text.

The API can store conversations for its client: a thread, continued by the id of its last answer. A request that
continues a thread has only the new messages: system prompt and tools are the thread's. So an unknown thread is refused,
and its client sends everything again; no answer is based on a part of a conversation.

https://docs.anthropic.com/en/api/messages
https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from farm.records.trajectory import Message
from workers.plugins.interfaces import Completion, Delta
from workers.policy.gateway.dialects import model_api
from workers.policy.gateway.dialects.model_api import AnsweredToolCall, ApiProblem, BadRequest, ParsedRequest
from workers.policy.gateway.dialects.request_fields import MESSAGE, MESSAGES, of_anthropic, schema_of_format
from workers.policy.message_images import joined

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionToolParam

_OF_THE_THREAD = ("system", "tools")
"""The fields that a thread keeps from its creation; a request that continues it omits them."""
_TEXT = ("text",)
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}


@dataclass(frozen=True, slots=True)
class StoredThread:
    """A thread's fields from its creation, and its messages up to the last answer."""

    fields: Mapping[str, Any]
    messages: Sequence[Message]


class ThreadStore:
    """The threads of one rollout, by the ids of their answers. Any answer may be continued, more than once."""

    def __init__(self) -> None:
        self._by_answer: dict[str, StoredThread] = {}

    def begun(self, body: Mapping[str, Any]) -> StoredThread | None:
        """Return the thread that a request creates or continues; None without one.

        Raises BadRequest for an unknown thread, or for a system prompt or tools that differ from the thread's.
        """
        requested = body.get("thread")
        if requested is None:
            return None
        kind = requested.get("type") if isinstance(requested, dict) else None
        if kind == "create":
            return StoredThread({name: body[name] for name in _OF_THE_THREAD if body.get(name)}, ())
        if kind != "continue":
            raise BadRequest("must be an object of type 'create' or 'continue'", "thread")
        answer_id = model_api.word(requested.get("previous_message_id"), "thread.previous_message_id")
        thread = self._by_answer.get(answer_id)
        if thread is None:
            raise _refused(404, "thread_not_found", f"no thread is stored for {answer_id!r}: send all messages again")
        for name in _OF_THE_THREAD:
            if body.get(name) and body[name] != thread.fields.get(name):
                raise _refused(400, "thread_fingerprint_mismatch", f"{name} differs from the thread's: create another")
        return thread

    def hold(self, answer_id: str, thread: StoredThread, messages: Sequence[Message]) -> None:
        """Store a thread under the id of its newest answer, the last of `messages`."""
        self._by_answer[answer_id] = StoredThread(thread.fields, messages)


def _refused(status: int, code: str, message: str) -> BadRequest:
    # The official clients decide by `error_code` whether to send the whole conversation again.
    return BadRequest(message, "thread", status=status, details={"error_code": code})


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """The parts of a completion that are sent to the client."""

    message_id: str
    model: str
    thinking: str
    text: str
    tool_uses: tuple[tuple[str, str, Mapping[str, Any]], ...]
    stop_reason: str
    stop_sequence: str | None
    usage: Mapping[str, int]

    def message(self) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if self.thinking:
            content.append({"type": "thinking", "thinking": self.thinking, "signature": ""})
        if self.text:
            content.append({"type": "text", "text": self.text, "citations": None})
        content += [_tool_use(call_id, name, arguments) for call_id, name, arguments in self.tool_uses]
        return {
            **_head(self.message_id, self.model),
            "content": content,
            "stop_reason": self.stop_reason,
            "stop_sequence": self.stop_sequence,
            "usage": self.usage,
        }


class MessagesEvents:
    """The `model_api.Events` of this API: one block after another, each started, filled and stopped."""

    def __init__(self, message_id: str, model: str, thinks: bool, shown: Callable[[Completion], ShownMessage]) -> None:
        self._message_id = message_id
        self._model = model
        self._thinks = thinks
        self._shown = shown
        self._index = -1
        self._open = ""
        self._sent = {"thinking": "", "text": ""}

    def begin(self) -> bytes:
        # The number of prompt tokens is known only after the answer; `message_delta` reports it.
        head = _head(self._message_id, self._model)
        message = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(0, 0, 0)}
        return _event("message_start", message=message)

    def delta(self, delta: Delta) -> bytes:
        if delta.reasoning and not self._thinks:
            return self.ping()
        return self._say("thinking" if delta.reasoning else "text", delta.text)

    def ping(self) -> bytes:
        return _event("ping")

    def end(self, completion: Completion) -> bytes:
        shown = self._shown(completion)
        pieces = [
            self._say("thinking", model_api.rest(shown.thinking, self._sent["thinking"])),
            self._say("text", model_api.rest(shown.text, self._sent["text"])),
            self._stop(),
        ]
        for call_id, name, arguments in shown.tool_uses:
            pieces.append(self._start("tool_use", _tool_use(call_id, name, {})))
            pieces.append(self._delta({"type": "input_json_delta", "partial_json": orjson.dumps(arguments).decode()}))
            pieces.append(self._stop())
        ended = {"stop_reason": shown.stop_reason, "stop_sequence": shown.stop_sequence}
        pieces.append(_event("message_delta", delta=ended, usage=shown.usage))
        return b"".join([*pieces, _event("message_stop")])

    def error(self, problem: ApiProblem) -> bytes:
        return _event("error", error={"type": "api_error", "message": problem.message})

    def _say(self, kind: str, text: str) -> bytes:
        """Return a piece of thinking or text, in the open block if it is of that kind."""
        if not text:
            return b""
        pieces = []
        if self._open != kind:
            pieces.append(self._stop())
            block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {"citations": None})}
            pieces.append(self._start(kind, block))
        self._sent[kind] += text
        return b"".join([*pieces, self._delta({"type": f"{kind}_delta", kind: text})])

    def _start(self, kind: str, block: Mapping[str, Any]) -> bytes:
        self._index += 1
        self._open = kind
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": ""}) if self._open == "thinking" else b""
        self._open = ""
        return signed + _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> bytes:
    return model_api.event({"type": kind, **fields}, kind)


def _head(message_id: str, model: str) -> dict[str, Any]:
    return {"id": message_id, "type": "message", "role": "assistant", "model": model}


def _usage(n_prompt: int, n_cached: int, n_response: int) -> dict[str, int]:
    """Return the usage; this API counts tokens from the engine's cache separately."""
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_response,
    }


def _tool_use(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


class MessagesApi:
    """The `model_api.Api` of this dialect. It remembers threads, and the policy's literal arguments, as clients send
    back only their meaning.
    """

    def __init__(self) -> None:
        self._written: dict[str, AnsweredToolCall] = {}
        self._threads = ThreadStore()

    def parse(self, body: Mapping[str, Any]) -> ParsedRequest:
        unknown = MESSAGES.unknown(body)
        thread = self._threads.begun(body)
        fields = body if thread is None else thread.fields
        tools, left_out = _tools(fields.get("tools"))
        left_out += [
            f"mcp_servers: {each.get('name')}"
            for each in model_api.mappings(body.get("mcp_servers") or [], "mcp_servers")
        ]
        choice = of_anthropic(body.get("tool_choice")).checked(tools, left_out, "tool_choice")
        new = model_api.conversation(self._messages(body.get("messages")), "messages")
        return ParsedRequest(
            messages=[*_system(fields.get("system")), *(thread.messages if thread is not None else ()), *new],
            tools=tools,
            model=str(body.get("model") or ""),
            stream=model_api.flag(body, "stream"),
            max_tokens=model_api.count(body, "max_tokens"),
            stop=model_api.texts(body.get("stop_sequences"), "stop_sequences"),
            requested_params=model_api.requested_params(body, left_out, unknown),
            body=body,
            tool_choice=choice.mode,
            tools_allowed=choice.allowed,
            answer_schema=_schema(body),
            labels=model_api.labels(body),
        )

    def answer(self, request: ParsedRequest, completion: Completion) -> dict[str, Any]:
        return self._shown(request, completion, model_api.new_id("msg")).message()

    def events(self, request: ParsedRequest) -> MessagesEvents:
        message_id = model_api.new_id("msg")
        return MessagesEvents(
            message_id, request.model, _thinks(request), lambda completion: self._shown(request, completion, message_id)
        )

    def problem(self, problem: ApiProblem) -> dict[str, Any]:
        kind = _KINDS.get(problem.status, "api_error")
        message = problem.message
        if problem.code == "context_length_exceeded":
            # Clients recognise by these words that they must shorten the conversation.
            message = f"prompt is too long: {message}"
        details = {"details": dict(problem.details)} if problem.details else {}
        return {"type": "error", "error": {"type": kind, "message": message, **details}}

    def counted(self, n_tokens: int) -> dict[str, Any]:
        return {"input_tokens": n_tokens}

    def _shown(self, request: ParsedRequest, completion: Completion, message_id: str) -> ShownMessage:
        """Return the answer as blocks. Thinking is included only if requested: other clients take it for the text."""
        message = completion.response
        calls = model_api.calls(message)
        self._written.update({call.call_id: call for call in calls})
        thread = self._threads.begun(request.body)
        if thread is not None:
            n_system = len(_system(thread.fields.get("system")))
            self._threads.hold(message_id, thread, [*request.messages[n_system:], message])
        stop = model_api.stop_text(completion, request)
        reason = _STOP_REASONS.get(model_api.finish_reason(completion), "end_turn")
        return ShownMessage(
            message_id=message_id,
            model=request.model,
            thinking=model_api.reasoning(message) if _thinks(request) else "",
            text=model_api.content(message),
            tool_uses=tuple((call.call_id, call.name, model_api.argument_object(call.arguments)) for call in calls),
            stop_reason="stop_sequence" if stop is not None and reason == "end_turn" else reason,
            stop_sequence=stop,
            usage=_usage(completion.n_prompt_tokens, completion.n_cached_tokens or 0, completion.n_response_tokens),
        )

    def _messages(self, value: object) -> list[Message]:
        messages: list[Message] = []
        for number, message in enumerate(model_api.mappings(value, "messages")):
            name = f"messages[{number}].content"
            model_api.refuse(message, MESSAGE.refused, f"messages[{number}]")
            content = message.get("content")
            blocks = (
                [{"type": "text", "text": content}] if isinstance(content, str) else model_api.mappings(content, name)
            )
            role = message.get("role")
            if role == "user":
                messages += _users(blocks, name)
            elif role == "assistant":
                messages.append(self._assistants(blocks, name))
            elif role == "system":
                messages += _system(blocks)
            else:
                raise BadRequest(f"{role!r} is not a known role", f"messages[{number}].role")
        return messages

    def _assistants(self, blocks: Sequence[Mapping[str, Any]], name: str) -> Message:
        text, thought, calls = [], [], []
        for number, block in enumerate(blocks):
            kind, path = block.get("type"), f"{name}[{number}]"
            if kind == "text":
                text.append(model_api.word(block.get("text"), f"{path}.text"))
            elif kind == "thinking":
                thought.append(model_api.word(block.get("thinking"), f"{path}.thinking"))
            elif kind == "tool_use":
                calls.append(self._call(block, path))
            elif kind != "redacted_thinking":
                raise BadRequest(f"a block of type {kind!r} is not taken from an assistant", path)
        return model_api.assistant("\n".join(text), "\n".join(thought), calls)

    def _call(self, block: Mapping[str, Any], name: str) -> AnsweredToolCall:
        call_id = model_api.word(block.get("id"), f"{name}.id")
        arguments = block.get("input")
        written = self._written.get(call_id)
        if written is not None and model_api.argument_object(written.arguments) == arguments:
            return AnsweredToolCall(call_id, model_api.word(block.get("name"), f"{name}.name"), written.arguments)
        if not isinstance(arguments, dict):
            raise BadRequest("must be an object", f"{name}.input")
        return AnsweredToolCall(
            call_id, model_api.word(block.get("name"), f"{name}.name"), orjson.dumps(arguments).decode()
        )


def _schema(body: Mapping[str, Any]) -> dict[str, Any] | None:
    config = body.get("output_config")
    if not isinstance(config, dict | None):
        raise BadRequest("must be an object", "output_config")
    output_format = (config or {}).get("format") or body.get("output_format")
    return schema_of_format(output_format, "output_config.format", flat=True)


def _thinks(request: ParsedRequest) -> bool:
    thinking = request.body.get("thinking")
    return isinstance(thinking, dict) and thinking.get("type") not in (None, "disabled")


def _system(value: object) -> list[Message]:
    text = model_api.plain(value, "system", _TEXT)
    return [{"role": "system", "content": text}] if text else []


def _users(blocks: Sequence[Mapping[str, Any]], name: str) -> list[Message]:
    """Return tool results as separate messages, with the text between them in order."""
    messages: list[Message] = []
    for number, block in enumerate(blocks):
        path = f"{name}[{number}]"
        if block.get("type") == "tool_result":
            shown = model_api.shown(block.get("content"), f"{path}.content", _TEXT)
            call_id = model_api.word(block.get("tool_use_id"), f"{path}.tool_use_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": shown})
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] = joined([messages[-1]["content"], model_api.shown([block], path, _TEXT)], "\n")
        else:
            messages.append({"role": "user", "content": model_api.shown([block], path, _TEXT)})
    return messages


def _tools(value: object) -> tuple[list[ChatCompletionToolParam], list[str]]:
    """Return the tools that have a schema, and the names of the vendor's own tools, which have none."""
    if not value:
        return [], []
    tools, left_out = [], []
    for number, tool in enumerate(model_api.mappings(value, "tools")):
        if isinstance(tool.get("input_schema"), dict):
            name = model_api.word(tool.get("name"), f"tools[{number}].name")
            tools.append(model_api.function(name, _described(tool, f"tools[{number}]"), tool["input_schema"]))
        else:
            left_out.append(str(tool.get("type") or tool.get("name")))
    return tools, left_out


def _described(tool: Mapping[str, Any], name: str) -> object:
    """Return a tool's description with its examples appended: chat templates have no other place for them."""
    described, examples = tool.get("description"), tool.get("input_examples")
    if not examples:
        return described
    shown = [orjson.dumps(each).decode() for each in model_api.mappings(examples, f"{name}.input_examples")]
    head = [described] if isinstance(described, str) and described else []
    return "\n".join([*head, "Examples of its input:", *shown])
