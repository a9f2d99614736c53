"""The history as strict servers take it: they parse the arguments of earlier tool calls, and refuse what is no JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from farm.trajectory import Message


def parseable(messages: Sequence[Message]) -> list[Message]:
    """The same messages, tool call arguments that are no JSON object wrapped as `{"malformed": text}`.

    Only for servers that refuse the history as it was sampled: it changes the prompt's ids.
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
