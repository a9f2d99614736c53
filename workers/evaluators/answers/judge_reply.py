r"""Parses the decision in a judge's reply: JSON, or the last box or label; anything else is unreadable."""

from __future__ import annotations

import json
import re

from workers.evaluators.answers.final_answer import last_box
from workers.evaluators.answers.normal_text import words

_MARK = re.compile(r"\\boxed\s*\{|\[\[\s*A\s*(!?=)\s*B\s*\]\]")
_FENCED = re.compile(r"^```(?:json)?\s*(.*?)\s*```$", re.DOTALL)
_DECISIONS = {"yes": True, "no": False}


def decision(reply: str) -> bool | None:
    """Return whether a reply calls the answers equal; None if it is unreadable.

    Thoughts before `</think>` are ignored; so is a reply with unclosed thoughts.
    """
    text = reply.rpartition("</think>")[2].strip()
    if "<think>" in text:
        return None
    marks = list(_MARK.finditer(text))
    if not marks:
        return _of_json(text)
    last = marks[-1]
    if last.group(1) is not None:
        return last.group(1) == "="
    boxed = last_box(text[last.start() :])
    return None if boxed is None else _DECISIONS.get(words(boxed))


def _of_json(text: str) -> bool | None:
    fenced = _FENCED.match(text)
    try:
        content = json.loads(fenced.group(1) if fenced else text)
    except (ValueError, RecursionError):
        return None
    equal = content.get("equal") if isinstance(content, dict) else None
    return equal if isinstance(equal, bool) else None
