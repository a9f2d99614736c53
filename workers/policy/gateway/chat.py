"""OpenAI's chat completions, `POST /v1/chat/completions`: the nearest to what the policy itself takes.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from farm.trajectory import Message
from workers.interfaces import Completion, Delta
from workers.policy.gateway import wire
from workers.policy.gateway.wire import Asked, BadRequest, Call, Problem

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class ChatApi:
    """See `wire.Api`."""

    def asked(self, body: Mapping[str, Any]) -> Asked:
        if body.get("n") not in (None, 1):
            raise BadRequest("only one answer is given to a request", "n")
        tools, left_out = _tools(body.get("tools"))
        messages = wire.mappings(body.get("messages"), "messages")
        return Asked(
            messages=[_message(message, f"messages[{number}]") for number, message in enumerate(messages)],
            tools=tools,
            model=str(body.get("model") or ""),
            stream=wire.flag(body, "stream"),
            max_tokens=wire.count(body, "max_completion_tokens", "max_tokens"),
            stop=wire.texts(body.get("stop"), "stop"),
            wishes=wire.wishes(body, left_out),
            body=body,
        )

    def answer(self, asked: Asked, completion: Completion) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": _answer(completion.message),
            "logprobs": None,
            "finish_reason": wire.finish_reason(completion),
        }
        return {
            "id": wire.new_id("chatcmpl"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": asked.model,
            "choices": [choice],
            "usage": usage(completion),
        }

    def events(self, asked: Asked) -> ChatEvents:
        return ChatEvents(asked)

    def problem(self, problem: Problem) -> dict[str, Any]:
        return openai_problem(problem)


class ChatEvents:
    """See `wire.Events`: chunks, the first with the role, the last but one with the reason, and `[DONE]`."""

    def __init__(self, asked: Asked) -> None:
        self._head = {
            "id": wire.new_id("chatcmpl"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": asked.model,
        }
        options = asked.body.get("stream_options")
        self._usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self._sent = {"content": "", "reasoning_content": ""}

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> bytes:
        return self._text("reasoning_content" if delta.reasoning else "content", delta.text)

    def ping(self) -> bytes:
        return wire.COMMENT

    def end(self, completion: Completion) -> bytes:
        message = completion.message
        pieces = [
            self._text("reasoning_content", wire.rest(wire.reasoning(message), self._sent["reasoning_content"])),
            self._text("content", wire.rest(wire.content(message), self._sent["content"])),
        ]
        for number, call in enumerate(wire.calls(message)):
            pieces.append(self._chunk({"tool_calls": [{"index": number, **wire.tool_call(call)}]}))
        pieces.append(self._chunk({}, wire.finish_reason(completion)))
        if self._usage:
            pieces.append(wire.event({**self._head, "choices": [], "usage": usage(completion)}))
        return b"".join([*pieces, b"data: [DONE]\n\n"])

    def error(self, problem: Problem) -> bytes:
        return wire.event(openai_problem(problem))

    def _text(self, field: str, text: str) -> bytes:
        self._sent[field] += text
        return self._chunk({field: text}) if text else b""

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return wire.event({**self._head, "choices": [choice], **({"usage": None} if self._usage else {})})


def usage(completion: Completion) -> dict[str, Any]:
    n_prompt, n_response = completion.n_prompt_tokens, completion.n_response_tokens
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_response,
        "total_tokens": n_prompt + n_response,
        "prompt_tokens_details": {"cached_tokens": completion.n_cached_tokens or 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def openai_problem(problem: Problem) -> dict[str, Any]:
    """The body of an error, as both APIs of OpenAI write it."""
    kind = "server_error" if problem.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": problem.message,
            "type": kind,
            "param": problem.param or None,
            "code": problem.code,
        }
    }


def _answer(message: Message) -> dict[str, Any]:
    calls = wire.calls(message)
    text, thought = wire.content(message), wire.reasoning(message)
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": text if text or not calls else None,
        "refusal": None,
        "annotations": [],
    }
    if thought:
        answer["reasoning_content"] = thought
    if calls:
        answer["tool_calls"] = [wire.tool_call(call) for call in calls]
    return answer


def _message(message: Mapping[str, Any], name: str) -> Message:
    """What of a message the policy is shown; keys that clients add are dropped."""
    role = message.get("role")
    text = wire.plain(message.get("content"), f"{name}.content", _TEXT_PARTS)
    if role in ("system", "developer"):
        return {"role": "system", "content": text}
    if role == "user":
        return {"role": "user", "content": text}
    if role == "tool":
        return {"role": "tool", "tool_call_id": str(message.get("tool_call_id") or ""), "content": text}
    if role == "assistant":
        thought = message.get("reasoning_content") or message.get("reasoning")
        return wire.assistant(text, thought if isinstance(thought, str) else "", _calls(message, name))
    raise BadRequest(f"{role!r} is no role", f"{name}.role")


def _calls(message: Mapping[str, Any], name: str) -> list[Call]:
    found = message.get("tool_calls")
    if not found:
        return []
    calls = []
    for number, call in enumerate(wire.mappings(found, f"{name}.tool_calls")):
        called = call.get("function")
        where = f"{name}.tool_calls[{number}].function"
        if not isinstance(called, dict):
            raise BadRequest("must be an object", where)
        arguments = wire.word(called.get("arguments") or "", f"{where}.arguments")
        calls.append(Call(str(call.get("id") or ""), wire.word(called.get("name"), f"{where}.name"), arguments))
    return calls


def _tools(value: object) -> tuple[list[dict[str, Any]], list[str]]:
    """The functions among the tools, and the names of what is none."""
    if not value:
        return [], []
    tools, left_out = [], []
    for number, tool in enumerate(wire.mappings(value, "tools")):
        called = tool.get("function")
        if tool.get("type") == "function" and isinstance(called, dict):
            name = wire.word(called.get("name"), f"tools[{number}].function.name")
            tools.append(wire.function(name, called.get("description"), called.get("parameters")))
        else:
            left_out.append(str(tool.get("type")))
    return tools, left_out
