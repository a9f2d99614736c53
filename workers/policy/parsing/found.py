"""A tool call as it was found in sampled text: well formed, or its raw text for the model to be told of.

Raw JSON is kept as it was sampled: `members` and `elements` give the text of values, not values written anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

UNREADABLE = (ValueError, RecursionError)
"""What reading JSON raises. Numbers of thousands of digits and nesting without end are among the reasons."""

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Found:
    """One call. `valid`: it has a name, and its arguments are the text of a JSON object."""

    name: str
    arguments: str
    call_id: str = ""
    valid: bool = True


Calls: TypeAlias = Sequence[Found]


def malformed(raw: str, name: str = "") -> Found:
    """A call that cannot be made; `raw` is what is shown of it, and no JSON object if there is a name."""
    return Found(name, raw.strip(), valid=False)


def called(name: str, arguments: str, call_id: str = "") -> Found:
    """A call of a name with what should be a JSON object."""
    arguments = arguments.strip()
    return Found(name, arguments, call_id, valid=bool(name) and members(arguments) is not None)


def object_call(raw: str, *keys: str) -> Found:
    """A call written as one JSON object: `name`, and the arguments under one of the keys."""
    found = members(raw)
    if found is None:
        return malformed(raw, leading_name(raw))
    name = text_of(found.get("name"))
    if not name:
        return malformed(raw)
    arguments = next((found[key] for key in keys if key in found), "{}")
    if arguments == "null":
        arguments = "{}"
    # some models send the object inside a string, as it goes over the wire of the OpenAI API
    return called(name, text_of(arguments) or arguments, text_of(found.get("id")))


def leading_name(raw: str) -> str:
    """The name at the head of an object that cannot be read to its end; empty if there is none."""
    match = _NAME.match(raw)
    return text_of(f'"{match.group(1)}"') if match else ""


def text_of(raw: str | None) -> str:
    """The text that a JSON string stands for; empty if it is none."""
    if not raw or not raw.startswith('"'):
        return ""
    try:
        value = json.loads(raw)
    except UNREADABLE:
        return ""
    return value if isinstance(value, str) else ""


def members(raw: str) -> dict[str, str] | None:
    """Key to the raw text of its value, if this is exactly one JSON object."""
    try:
        return _members(raw)
    except UNREADABLE:
        return None


def elements(raw: str) -> list[str] | None:
    """The raw text of each element, if this is exactly one JSON array."""
    try:
        return _elements(raw)
    except UNREADABLE:
        return None


def _members(raw: str) -> dict[str, str]:
    found = {}
    at = _past(raw, 0, "{")
    while not raw.startswith("}", at):
        key, at = _DECODER.raw_decode(raw, at)
        if not isinstance(key, str):
            raise ValueError("a key that is no string")
        start = _past(raw, at, ":")
        at = _DECODER.raw_decode(raw, start)[1]
        found[key] = raw[start:at]
        at = _past_comma(raw, at, "}")
    _end(raw, at + 1)
    return found


def _elements(raw: str) -> list[str]:
    found = []
    at = _past(raw, 0, "[")
    while not raw.startswith("]", at):
        end = _DECODER.raw_decode(raw, at)[1]
        found.append(raw[at:end])
        at = _past_comma(raw, end, "]")
    _end(raw, at + 1)
    return found


def _past_comma(raw: str, at: int, closer: str) -> int:
    """Where the next entry begins, or the closing bracket stands."""
    at = _space(raw, at)
    if raw.startswith(closer, at):
        return at
    at = _past(raw, at, ",")
    if raw.startswith(closer, at):
        raise ValueError("a comma before the end")
    return at


def _past(raw: str, at: int, char: str) -> int:
    """Beyond a character that must come next, and the blanks around it."""
    at = _space(raw, at)
    if not raw.startswith(char, at):
        raise ValueError(f"no {char}")
    return _space(raw, at + 1)


def _end(raw: str, at: int) -> None:
    if _space(raw, at) != len(raw):
        raise ValueError("text after the end")


def _space(raw: str, at: int) -> int:
    match = _SPACE.match(raw, at)
    return match.end() if match else at
