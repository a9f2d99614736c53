"""The initial conversation of a row, wherever its data set keeps it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

_MEDIA = ("images", "image", "videos", "video", "audios", "audio")


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
    """Return the last user message."""
    return next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")


def refuse_media(row: Mapping[str, Any]) -> None:
    """Raise ValueError for a row with images, audio or video, which a text-only policy could not see."""
    for name in _MEDIA:
        value = row.get(name)
        if value is not None and value != "" and value != [] and value != {}:
            raise ValueError(f"the row has `{name}`, which a text-only policy cannot see: leave such rows out")


def _messages(content: Any) -> list[dict[str, str]]:
    if isinstance(content, str):
        content = _of_json(content)
    if isinstance(content, str):
        return [{"role": "user", "content": content}] if content.strip() else []
    if not isinstance(content, Sequence):
        return []
    return [_message(each) for each in content]


def _of_json(text: str) -> Any:
    """Return the messages in a JSON text, as some data sets keep them; any other text unchanged."""
    if text.lstrip().startswith("[{") or text.lstrip().startswith("[ {"):
        with contextlib.suppress(ValueError):
            value = json.loads(text)
            if all(isinstance(each, Mapping) and "role" in each for each in value):
                return value
    return text


def _message(each: Any) -> dict[str, str]:
    if not isinstance(each, Mapping):
        raise ValueError(f"a message of the row's prompt is {str(each)[:40]!r}, not an object with a role and a text")
    role, text = each.get("role"), each.get("content")
    if each.get("tool_calls") or role in ("tool", "function"):
        raise ValueError(
            "a message of the row's prompt calls a tool or is a tool's: such a conversation is not supported"
        )
    if isinstance(text, list):
        text = "".join(map(_text_of_part, text))
    # A policy that does not know `developer` gets the equivalent role.
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant") or not isinstance(text, str):
        raise ValueError("a message of the row's prompt has no role `system`, `user` or `assistant`, or no text")
    return {"role": role, "content": text}


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
        raise ValueError(f"a message of the row's prompt has a part of type {kind!r}; only text is supported")
    return str(part["text"])
