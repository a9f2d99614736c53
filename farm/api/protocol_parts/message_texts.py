"""Texts of chat messages in any of their forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def reasoning_and_text(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the reasoning and the text of a message."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(message.get("reasoning_content") or message.get("reasoning") or ""), str(content or "")
