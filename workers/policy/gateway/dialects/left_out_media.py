"""Replaces images, audio and files in requests by a line of text, if the batch's rule says so.

Text documents are kept. The arguments of tool calls are not examined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT_KINDS = {
    **dict.fromkeys(("image_url", "image", "input_audio", "audio_url", "video_url", "file", "document"), "text"),
    **dict.fromkeys(("input_image", "input_file", "input_video"), "input_text"),
}
GOOGLE_MEDIA = ("inlineData", "inline_data", "fileData", "file_data")
CONVERSATION = frozenset(
    {
        *("messages", "input", "contents", "system"),
        *("systemInstruction", "system_instruction", "generateContentRequest", "generate_content_request"),
    }
)
CONTENT = frozenset({"content", "parts", "output", "contents", "systemInstruction", "system_instruction"})
"""The fields that may have parts, in a message, a tool result or a nested request."""
RESULTS = ("functionResponse", "function_response")
_LEFT_OUT = "[media left out]"


def without_media(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with a text in place of each part that is not text."""
    return {name: _left_out(value) if name in CONVERSATION else value for name, value in body.items()}


def _left_out(value: Any) -> Any:
    if isinstance(value, list):
        return [_left_out(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if isinstance(kind, str) and kind in _TEXT_KINDS:
        name = kind.removeprefix("input_").removesuffix("_url")
        return {"type": _TEXT_KINDS[kind], "text": _text_of(value) or f"[{name} left out]"}
    if any(name in value for name in GOOGLE_MEDIA):
        return {"text": _LEFT_OUT}
    return {name: _result(each) if name in RESULTS else _within(name, each) for name, each in value.items()}


def _within(name: str, value: Any) -> Any:
    return _left_out(value) if name in CONTENT else value


def _text_of(document: Mapping[str, Any]) -> str:
    """Return the text of a document of Anthropic's API; empty if it is not a text document."""
    source = document.get("source")
    if document["type"] != "document" or not isinstance(source, dict):
        return ""
    if source.get("type") == "text":
        texts = [source.get("data")]
    else:
        given = source.get("content") if source.get("type") == "content" else None
        parts = _left_out([{"type": "text", "text": given}] if isinstance(given, str) else given)
        texts = [each.get("text") for each in parts if isinstance(each, dict)] if isinstance(parts, list) else []
    shown = [each for each in (document.get("title"), document.get("context"), *texts) if isinstance(each, str)]
    return "\n".join(shown) if texts else ""


def _result(value: Any) -> Any:
    """Return a function result of Google's API, with a text in place of the media beside it."""
    if not isinstance(value, dict) or not value.get("parts"):
        return value
    response = value.get("response")
    shown = dict(response) if isinstance(response, dict) else {} if response is None else {"result": response}
    if len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
        shown = dict.fromkeys(shown, f"{only}\n{_LEFT_OUT}")
    else:
        shown["media"] = _LEFT_OUT
    return {**{name: each for name, each in value.items() if name != "parts"}, "response": shown}
