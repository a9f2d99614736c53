"""Tool calls in sampled text: well formed, or malformed with their raw text, to be reported to the model.

Raw JSON is kept as sampled: `members` and `elements` return the text of values, not re-encoded values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

UNREADABLE = (ValueError, RecursionError)
"""The exceptions of parsing JSON, including numbers of thousands of digits and too deep nesting."""

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One call. `valid`: it has a name, and its arguments are the text of a JSON object."""

    name: str
    arguments: str
    call_id: str = ""
    valid: bool = True


Calls: TypeAlias = Sequence[ParsedToolCall]


def malformed(raw: str, name: str = "") -> ParsedToolCall:
    """Return an invalid call; `raw` becomes its arguments, and is not a JSON object if there is a name."""
    return ParsedToolCall(name, raw.strip(), valid=False)


def from_json(name: str, arguments: str, call_id: str = "") -> ParsedToolCall:
    """Return a call with these arguments; it is valid with a name and a JSON object as arguments."""
    arguments = arguments.strip()
    return ParsedToolCall(name, arguments, call_id, valid=bool(name) and members(arguments) is not None)


def from_object(raw: str, *keys: str) -> ParsedToolCall:
    """Return a call written as one JSON object: `name`, and the arguments under one of the keys."""
    fields = members(raw)
    if fields is None:
        return malformed(raw, leading_name(raw))
    name = text_of(fields.get("name"))
    if not name:
        return malformed(raw)
    arguments = next((fields[key] for key in keys if key in fields), "{}")
    if arguments == "null":
        arguments = "{}"
    # Some models send the object inside a string, as on the wire of the OpenAI API.
    return from_json(name, text_of(arguments) or arguments, text_of(fields.get("id")))


def leading_name(raw: str) -> str:
    """Return the name at the head of an incomplete object; empty if there is none."""
    match = _NAME.match(raw)
    return text_of(f'"{match.group(1)}"') if match else ""


def text_of(raw: str | None) -> str:
    """Return the value of a JSON string; empty for anything else."""
    if not raw or not raw.startswith('"'):
        return ""
    try:
        value = json.loads(raw)
    except UNREADABLE:
        return ""
    return value if isinstance(value, str) else ""


def members(raw: str) -> dict[str, str] | None:
    """Return key to the raw text of its value if this is exactly one JSON object; else None."""
    raw_values = {}
    try:
        at = _past(raw, 0, "{")
        while not raw.startswith("}", at):
            key, at = _DECODER.raw_decode(raw, at)
            if not isinstance(key, str):
                return None
            start = _past(raw, at, ":")
            at = _DECODER.raw_decode(raw, start)[1]
            raw_values[key] = raw[start:at]
            at = _past_comma(raw, at, "}")
    except UNREADABLE:
        return None
    return raw_values if _space(raw, at + 1) == len(raw) else None


def elements(raw: str) -> list[str] | None:
    """Return the raw text of each element if this is exactly one JSON array; else None."""
    raw_elements = []
    try:
        at = _past(raw, 0, "[")
        while not raw.startswith("]", at):
            end = _DECODER.raw_decode(raw, at)[1]
            raw_elements.append(raw[at:end])
            at = _past_comma(raw, end, "]")
    except UNREADABLE:
        return None
    return raw_elements if _space(raw, at + 1) == len(raw) else None


def _past_comma(raw: str, at: int, closer: str) -> int:
    """Return the position of the next entry, or of the closing bracket. Raises ValueError."""
    at = _space(raw, at)
    if raw.startswith(closer, at):
        return at
    at = _past(raw, at, ",")
    if raw.startswith(closer, at):
        raise ValueError("a comma before the end")
    return at


def _past(raw: str, at: int, char: str) -> int:
    at = _space(raw, at)
    if not raw.startswith(char, at):
        raise ValueError(f"no {char}")
    return _space(raw, at + 1)


def _space(raw: str, at: int) -> int:
    match = _SPACE.match(raw, at)
    return match.end() if match else at
