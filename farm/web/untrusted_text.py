"""Text of a policy made safe for display: characters that could mislead a browser or a reader become visible.

Templates escape HTML. This module handles characters that are no text: control characters, terminal escapes, marks that
change the direction of writing, invisible letters and tags, and unpaired surrogates, which no page can contain.
"""

from __future__ import annotations

import json
import re
from typing import Any

from farm.records.trajectory import Message

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
_PICTURES = 0x2400
LONG = 2_000
"""Texts longer than this number of characters are shown folded."""
LONGEST = 200_000
"""The number of characters of a text that a page shows; the rest is in the exports."""


def visible(text: object) -> str:
    """Return a text in which every invisible character is written out."""
    whole = str(text).replace("\r\n", "\n")
    cut = len(whole) - LONGEST
    if cut > 0:
        whole = (
            f"{whole[: LONGEST // 2]}\n[… {cut} characters are left out here; the exports have them …]\n"
            + (whole[-LONGEST // 2 :])
        )
    return _HIDDEN.sub(_written_out, whole)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(_PICTURES + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


def text_of(content: object) -> str:
    """Return the text of a message's content; parts other than text are named."""
    if isinstance(content, list):
        return "".join(_part(part) for part in content)
    return "" if content is None else str(content)


def _part(part: object) -> str:
    if not isinstance(part, dict):
        return str(part)
    if "text" in part:
        return str(part["text"])
    return f"[{part.get('type', 'part')}]"


def reasoning_of(message: Message) -> str:
    """Return the reasoning of a policy before its answer; empty without any."""
    return text_of(message.get("reasoning_content") or message.get("reasoning"))


def arguments_of(raw: Any) -> list[tuple[str, str]]:
    """Return the arguments of a tool call by name; a text that is no JSON object is one without a name."""
    try:
        values = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError:
        return [("", str(raw))]
    if not isinstance(values, dict):
        return [("", str(raw))]
    return [
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in values.items()
    ]
