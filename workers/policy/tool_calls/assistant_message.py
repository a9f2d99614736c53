"""A parsed text as an assistant message of the OpenAI API, and a message as the pieces of a stream."""

from __future__ import annotations

import secrets
import string
from typing import Any

from farm.records.trajectory import Message, ToolCall
from workers.plugins.interfaces import Delta
from workers.policy.tool_calls.splitter import Parsed

_ALPHABET = string.ascii_letters + string.digits
_ID_CHARS = 9
"""Length of a call id: required by Mistral's templates; others accept any length."""


def message(parsed: Parsed) -> Message:
    """Return the assistant message; every tool call has an id, a malformed one its raw text as arguments."""
    made: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        made["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        made["tool_calls"] = [_entry(call) for call in parsed.tool_calls]
    return made


def deltas(message: Message) -> list[Delta]:
    """Return the text of a whole message as the deltas of a stream."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    content = message.get("content")
    pieces = [Delta(reasoning, reasoning=True)] if isinstance(reasoning, str) and reasoning else []
    return [*pieces, Delta(content)] if isinstance(content, str) and content else pieces


def _entry(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.call_id or _new_id(),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _new_id() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_CHARS))
