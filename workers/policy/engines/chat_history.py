"""Adapts the chat history to servers: they differ in the name of the reasoning field, and in strictness."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from farm.records.trajectory import Message


def named(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with reasoning under both names: vLLM reads only `reasoning`, others `reasoning_content`.

    A server that does not find the reasoning of an earlier turn omits it from the prompt.
    """
    return [_named(message) for message in messages]


def _named(message: Message) -> Message:
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    return {**message, "reasoning": reasoning, "reasoning_content": reasoning} if reasoning else message


def parseable(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with tool call arguments that are not a JSON object wrapped as `{"malformed": text}`.

    Only for servers that parse arguments and refuse the history as sampled: it changes the prompt's ids.
    """
    return [
        {**message, "tool_calls": [_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if _is_object(function["arguments"]):
        return call
    return {**call, "function": {**function, "arguments": json.dumps({"malformed": function["arguments"]})}}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
