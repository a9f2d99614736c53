"""The conversation of a rollout as turns for display. Messages may have any shape, as their authors are not trusted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.records.trajectory import ModelCall
from farm.web.untrusted_text import arguments_of, reasoning_of, text_of

_MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
_DIGEST = re.compile("[0-9a-f]{64}")
_ROLES = frozenset({"system", "user", "assistant", "tool"})


@dataclass(frozen=True, slots=True)
class ShownCall:
    """A tool call: the tool's name, and its arguments by name."""

    name: str
    arguments: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """A message. `style` is one of the four roles; `at_s` is its time, in seconds from the first call.

    `call` is the model call that it answers, if any. `images` are the names of the artefacts of its image parts.
    """

    role: str
    style: str
    answers: str
    thought: str
    text: str
    calls: Sequence[ShownCall]
    at_s: float
    call: ModelCall | None = None
    images: Sequence[str] = ()


def conversation(calls: Sequence[ModelCall]) -> list[ShownTurn]:
    """Return all messages of some model calls, in order."""
    return list(_messages(calls))


def _messages(calls: Sequence[ModelCall]) -> Iterator[ShownTurn]:
    for call in calls:
        start = call.started_at - calls[0].started_at
        end = start + call.latency_s
        yield from (_shown(message, start) for message in call.messages)
        yield _shown(call.response, end, call)
        yield from (_shown(message, end) for message in call.observations)


def _shown(message: Mapping[str, Any], at_s: float, call: ModelCall | None = None) -> ShownTurn:
    role = str(message.get("role", "?"))
    return ShownTurn(
        role,
        role if role in _ROLES else "user",
        str(message.get("tool_call_id") or ""),
        reasoning_of(dict(message)),
        text_of(message.get("content")),
        tool_calls(message),
        at_s,
        call,
        _images(message.get("content")),
    )


def _images(content: object) -> list[str]:
    """Return the names of the artefacts of a content's images; recorded messages contain their digests."""
    parts = content if isinstance(content, list) else ()
    return [
        f"{part['sha256']}.{part['media_type'].partition('/')[2]}"
        for part in parts
        if isinstance(part, dict)
        and part.get("type") == "image"
        and part.get("media_type") in _MEDIA_TYPES
        and isinstance(part.get("sha256"), str)
        and _DIGEST.fullmatch(part["sha256"])
    ]


def tool_calls(message: Mapping[str, Any]) -> list[ShownCall]:
    """Return the tool calls of a message; a malformed one is shown as its text."""
    made = message.get("tool_calls") or ()
    result = []
    for each in made if isinstance(made, list | tuple) else (made,):
        function = each.get("function") if isinstance(each, dict) else None
        if isinstance(function, dict):
            result.append(ShownCall(str(function.get("name", "?")), arguments_of(function.get("arguments", ""))))
        else:
            result.append(ShownCall("?", [("", str(each))]))
    return result
