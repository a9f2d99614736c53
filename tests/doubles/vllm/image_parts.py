"""Images in vLLM's chat requests: each becomes a number of placeholder ids in the prompt, depending on its size."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

from farm.records.trajectory import Message
from workers.testing.engine.model_text import END_OF_TEXT
from workers.testing.engine.web import RequestRefused

PLACEHOLDER = END_OF_TEXT
"""The placeholder token: the double's vocabulary has no special one."""
_PIXELS = 28
"""The side of the square that one placeholder stands for."""


def n_places(width: int, height: int) -> int:
    """Return the number of placeholder ids of an image of this size."""
    return -(-width // _PIXELS) * -(-height // _PIXELS)


def with_places(messages: Sequence[Message], model: str, *, takes_images: bool) -> list[Message]:
    """Return the messages with a text of placeholders for each image. Raises RequestRefused with vLLM's message."""
    return [
        {**message, "content": [_shown(part, model, takes_images) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _shown(part: Any, model: str, takes_images: bool) -> Any:
    if not isinstance(part, dict) or part.get("type") in ("text", "refusal", "thinking"):
        return part
    if part.get("type") != "image_url":
        raise RequestRefused(f"Unknown part type: {part.get('type')}")
    if not takes_images:
        raise RequestRefused(f"{model} is not a multimodal model")
    head, _, text = part["image_url"]["url"].partition(",")
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error:
        data = b""
    # the size is in the first chunk of a PNG
    if not head.startswith("data:image/") or not data.startswith(b"\x89PNG") or len(data) < 24:
        raise RequestRefused("Failed to load image: cannot identify image file <_io.BytesIO object>")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    return {"type": "text", "text": PLACEHOLDER * n_places(width, height)}
