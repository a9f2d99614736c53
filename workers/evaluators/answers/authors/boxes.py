"""The last box of a text, by the authors' rules: from its last mark up to the matching closing brace."""

from __future__ import annotations

import re

BOX = "\\boxed{"
_BRACE = re.compile(r"[{}]")


def last_box(text: str) -> str | None:
    """Return the contents of the last box; None if there is none, or it is unclosed. Escaped braces count."""
    start = text.rfind(BOX)
    return None if start < 0 else box_at(text, start)


def box_of_last_mark(text: str) -> str | None:
    r"""Return the contents of the box at the last `\boxed`; None if it has no brace there, or is unclosed."""
    start = text.rfind("\\boxed")
    return box_at(text, start) if start >= 0 and text.startswith(BOX, start) else None


def box_at(text: str, start: int) -> str | None:
    """Return the contents of the box that begins at a position; None if it is unclosed."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start + len(BOX) : brace.start()]
    return None
