"""Messages in the form that chat templates expect, with the same choices as vLLM's.

Tool call arguments become objects; lists of text parts become one text, unless the template iterates over parts;
reasoning is set under both of its names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from farm.records.trajectory import Message

PARTS_JOIN = "\n"


@dataclass(frozen=True, slots=True)
class Style:
    """The form in which a template expects messages.

    Content always as `parts`; missing content as `none`; call ids of nine letters; arguments as their original text.
    """

    parts: bool = False
    none: bool = False
    short_ids: bool = False
    text_arguments: bool = False


def n_chars(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int:
    """Return about how many characters a template renders: all texts and keys in the messages' values and the tools."""
    n = 0
    values: list[Any] = [*tools]
    for message in messages:
        values.extend(message.values())
    # Each call counts the whole history again, and most of it is text.
    while values:
        value = values.pop()
        kind = type(value)
        if kind is str:
            n += len(value)
        elif kind is dict:
            values.extend(value)
            values.extend(value.values())
        elif kind is list or kind is tuple:
            values.extend(value)
        elif value is not None:
            n += len(str(value))
    return n


def n_chars_at_most(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int:
    """Return an upper bound of `n_chars` at a tenth of its cost: non-text values count as JSON, escapes included."""
    values = [value for message in messages for value in message.values()]
    texts = [value for value in values if type(value) is str]
    try:
        return sum(map(len, texts)) + len(orjson.dumps([tools, *(v for v in values if type(v) is not str)]))
    except TypeError:
        return n_chars(messages, tools)


def prepared(message: Message, style: Style) -> Message:
    """Return a copy for a template, without empty fields."""
    ready = {key: value for key, value in message.items() if value is not None}
    calls = [_call(call, style) for call in ready.pop("tool_calls", ())]
    ready["content"] = _content(message.get("content"), style, bool(calls))
    if calls:
        ready["tool_calls"] = calls
    if thinking := reasoning(message):
        ready["reasoning"] = ready["reasoning_content"] = thinking
    if style.short_ids and "tool_call_id" in ready:
        ready["tool_call_id"] = _short(ready["tool_call_id"])
    return ready


def reasoning(message: Message) -> str:
    """Return the reasoning before the answer; empty if the message has none."""
    for key in ("reasoning_content", "reasoning"):
        if isinstance(value := message.get(key), str) and value:
            return value
    return ""


def text_of(content: Any, join: str = PARTS_JOIN) -> str | None:
    """Return content as one text: missing is empty, text parts are joined. None if it holds anything but text."""
    if not content:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [part if isinstance(part, str) else _part_text(part) for part in content]
    return None if None in texts else join.join(text for text in texts if text is not None)


def arguments_of(raw: Any) -> dict[str, Any]:
    """Return tool call arguments as an object; other values are kept as `{"malformed": text}`."""
    if isinstance(raw, dict):
        return raw
    if raw is None or raw == "":
        return {}
    try:
        value = orjson.loads(raw)
    except (orjson.JSONDecodeError, TypeError):
        return {"malformed": str(raw)}
    return value if isinstance(value, dict) else {"malformed": str(raw)}


def _text_arguments(raw: Any) -> str:
    return raw if isinstance(raw, str) else orjson.dumps(raw or {}).decode()


def _part_text(part: Any) -> str | None:
    if not isinstance(part, dict) or not isinstance(text := part.get("text"), str):
        return None
    return text if part.get("type") in ("text", "input_text", "output_text") else None


def _content(content: Any, style: Style, has_calls: bool) -> Any:
    text = text_of(content)
    if text is None:
        return content
    if not text and has_calls and style.none:
        return None
    return [{"type": "text", "text": text}] if style.parts else text


def _call(call: dict[str, Any], style: Style) -> dict[str, Any]:
    function = call.get("function") or {}
    raw = function.get("arguments")
    arguments = _text_arguments(raw) if style.text_arguments else arguments_of(raw)
    ready = {**call, "type": "function", "function": {**function, "arguments": arguments}}
    if style.short_ids and "id" in ready:
        ready["id"] = _short(ready["id"])
    return ready


def _short(call_id: Any) -> str:
    # Mistral's templates refuse ids of any other length; its servers take the last nine letters.
    return str(call_id)[-9:].rjust(9, "0")
