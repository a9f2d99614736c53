"""Images, audio and files in requests, left out where the batch says so: a line of text stands in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT_KINDS = {
    **dict.fromkeys(("image_url", "image", "input_audio", "document", "file"), "text"),
    **dict.fromkeys(("input_image", "input_file"), "input_text"),
}
_GOOGLE = ("inlineData", "inline_data", "fileData", "file_data")
_CONVERSATION = ("messages", "input", "contents")
_CONTENT = ("content", "parts", "output")
"""The fields with parts in them, of a message or of a result of a tool; what a call is given is not looked at."""


def without_media(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with a text in place of each part that is no text."""
    return {name: _left_out(value) if name in _CONVERSATION else value for name, value in body.items()}


def _left_out(value: Any) -> Any:
    if isinstance(value, list):
        return [_left_out(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if isinstance(kind, str) and kind in _TEXT_KINDS:
        return {"type": _TEXT_KINDS[kind], "text": f"[{kind.removeprefix('input_').removesuffix('_url')} left out]"}
    if any(name in value for name in _GOOGLE):
        return {"text": "[media left out]"}
    return {name: _left_out(each) if name in _CONTENT else each for name, each in value.items()}
