"""The conversation that a row begins with, wherever its data set keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def messages_of(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a row's `prompt` or `responses_create_params.input`; none if it has neither."""
    parameters = row.get("responses_create_params")
    content = row.get("prompt")
    if isinstance(parameters, Mapping):
        content = parameters.get("input")
        if instructions := parameters.get("instructions"):
            return [{"role": "system", "content": str(instructions)}, *_messages(content)]
    return _messages(content)


def text_of(messages: Sequence[Mapping[str, str]]) -> str:
    """Return the last of the user's messages."""
    return next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")


def _messages(content: Any) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}] if content.strip() else []
    if not isinstance(content, Sequence):
        return []
    return [_message(each) for each in content]


def _message(each: Any) -> dict[str, str]:
    role, text = (each.get("role"), each.get("content")) if isinstance(each, Mapping) else (None, None)
    if isinstance(text, list):
        text = "".join(str(part.get("text", "")) for part in text if isinstance(part, Mapping))
    # a policy that is not taught to know `developer` is given what that means
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant") or not isinstance(text, str):
        raise ValueError("a message of the row's prompt has no role `system`, `user` or `assistant`, or no text")
    return {"role": role, "content": text}
