"""Texts of chat messages, however they are put."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def reasoning_and_text(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return what a message reasons, and what it says."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(message.get("reasoning_content") or message.get("reasoning") or ""), str(content or "")
