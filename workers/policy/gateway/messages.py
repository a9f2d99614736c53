"""Anthropic's messages, `POST /v1/messages`: content in blocks, tool calls as objects instead of text.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from farm.trajectory import Message
from workers.interfaces import Completion
from workers.policy.gateway import wire
from workers.policy.gateway.messages_events import MessagesEvents, Shown
from workers.policy.gateway.wire import Asked, BadRequest, Call, Problem

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
RAW = "malformed"
"""Under which a client is given the arguments of a call that are no JSON object; its own check tells the policy."""


class MessagesApi:
    """See `wire.Api`. It remembers the arguments that the policy wrote, as clients send back only what they mean."""

    def __init__(self) -> None:
        self._written: dict[str, Call] = {}

    def asked(self, body: Mapping[str, Any]) -> Asked:
        tools, left_out = _tools(body.get("tools"))
        return Asked(
            messages=[*_system(body.get("system")), *self._messages(body.get("messages"))],
            tools=tools,
            model=str(body.get("model") or ""),
            stream=wire.flag(body, "stream"),
            max_tokens=wire.count(body, "max_tokens"),
            stop=wire.texts(body.get("stop_sequences"), "stop_sequences"),
            wishes=wire.wishes(body, left_out),
            body=body,
        )

    def answer(self, asked: Asked, completion: Completion) -> dict[str, Any]:
        return self._shown(asked, completion).message()

    def events(self, asked: Asked) -> MessagesEvents:
        return MessagesEvents(asked.model, _thinks(asked), lambda completion: self._shown(asked, completion))

    def problem(self, problem: Problem) -> dict[str, Any]:
        kind = _KINDS.get(problem.status, "api_error")
        message = problem.message
        if problem.code == "context_length_exceeded":
            # by these words clients know that they must shorten the conversation
            message = f"prompt is too long: {message}"
        return {"type": "error", "error": {"type": kind, "message": message}}

    def _shown(self, asked: Asked, completion: Completion) -> Shown:
        """The answer as blocks. Thinking is shown only to clients that ask for it: others take the first for text."""
        message = completion.message
        calls = wire.calls(message)
        self._written.update({call.call_id: call for call in calls})
        stop = wire.stop_text(completion, asked)
        reason = _STOP_REASONS.get(wire.finish_reason(completion), "end_turn")
        return Shown(
            model=asked.model,
            thinking=wire.reasoning(message) if _thinks(asked) else "",
            text=wire.content(message),
            tool_uses=tuple((call.call_id, call.name, _object(call.arguments)) for call in calls),
            stop_reason="stop_sequence" if stop is not None and reason == "end_turn" else reason,
            stop_sequence=stop,
            n_prompt_tokens=completion.n_prompt_tokens,
            n_cached_tokens=completion.n_cached_tokens or 0,
            n_response_tokens=completion.n_response_tokens,
        )

    def _messages(self, value: object) -> list[Message]:
        found: list[Message] = []
        for number, message in enumerate(wire.mappings(value, "messages")):
            name = f"messages[{number}].content"
            content = message.get("content")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else wire.mappings(content, name)
            role = message.get("role")
            if role == "user":
                found += _users(blocks, name)
            elif role == "assistant":
                found.append(self._assistants(blocks, name))
            elif role == "system":
                found += _system(blocks)
            else:
                raise BadRequest(f"{role!r} is no role", f"messages[{number}].role")
        return found

    def _assistants(self, blocks: Sequence[Mapping[str, Any]], name: str) -> Message:
        text, thought, calls = [], [], []
        for number, block in enumerate(blocks):
            kind, where = block.get("type"), f"{name}[{number}]"
            if kind == "text":
                text.append(wire.word(block.get("text"), f"{where}.text"))
            elif kind == "thinking":
                thought.append(wire.word(block.get("thinking"), f"{where}.thinking"))
            elif kind == "tool_use":
                calls.append(self._call(block, where))
            elif kind != "redacted_thinking":
                raise BadRequest(f"a block of type {kind!r} is not taken from an assistant", where)
        return wire.assistant("\n".join(text), "\n".join(thought), calls)

    def _call(self, block: Mapping[str, Any], name: str) -> Call:
        call_id = wire.word(block.get("id"), f"{name}.id")
        given = block.get("input")
        written = self._written.get(call_id)
        if written is not None and _object(written.arguments) == given:
            return Call(call_id, wire.word(block.get("name"), f"{name}.name"), written.arguments)
        if not isinstance(given, dict):
            raise BadRequest("must be an object", f"{name}.input")
        return Call(call_id, wire.word(block.get("name"), f"{name}.name"), orjson.dumps(given).decode())


def _thinks(asked: Asked) -> bool:
    thinking = asked.body.get("thinking")
    return isinstance(thinking, dict) and thinking.get("type") not in (None, "disabled")


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call as the object that this API wants."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) and wire.writable(value) else {RAW: arguments}


def _system(value: object) -> list[Message]:
    text = wire.plain(value, "system", _TEXT)
    return [{"role": "system", "content": text}] if text else []


def _users(blocks: Sequence[Mapping[str, Any]], name: str) -> list[Message]:
    """Results of tools are messages of their own; text around them stays where it is."""
    found: list[Message] = []
    for number, block in enumerate(blocks):
        where = f"{name}[{number}]"
        if block.get("type") == "tool_result":
            text = wire.plain(block.get("content"), f"{where}.content", _TEXT)
            call_id = wire.word(block.get("tool_use_id"), f"{where}.tool_use_id")
            found.append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif found and found[-1]["role"] == "user":
            found[-1]["content"] += "\n" + wire.plain([block], where, _TEXT)
        else:
            found.append({"role": "user", "content": wire.plain([block], where, _TEXT)})
    return found


def _tools(value: object) -> tuple[list[dict[str, Any]], list[str]]:
    """Those with a schema of their own; others are known by name to the vendor's models alone."""
    if not value:
        return [], []
    tools, left_out = [], []
    for number, tool in enumerate(wire.mappings(value, "tools")):
        if isinstance(tool.get("input_schema"), dict):
            name = wire.word(tool.get("name"), f"tools[{number}].name")
            tools.append(wire.function(name, tool.get("description"), tool["input_schema"]))
        else:
            left_out.append(str(tool.get("type") or tool.get("name")))
    return tools, left_out
