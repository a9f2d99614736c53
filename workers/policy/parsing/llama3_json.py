"""Llama 3: `{"name": …, "parameters": {…}}`, or several parted by `;`, `<|python_tag|>` before or not.

Without that marker, only an object where content would begin is a call, and only if it has a name and parameters;
any other is an answer in JSON. With it, anything that is no such object is a malformed call.
"""

from __future__ import annotations

from workers.policy.parsing.found import Calls, leading_name, malformed, members, object_call, text_of
from workers.policy.parsing.regions import Bracketed, Headed, Region, Scan
from workers.policy.parsing.schemas import Schemas
from workers.policy.parsing.splitter import Grammar

OPEN = "<|python_tag|>"
DROPPED = ("<|python_start|>", "<|python_end|>")
"""Around the calls of Llama 4."""
_KEYS = ("parameters", "arguments")


def grammar(schemas: Schemas) -> Grammar:
    return Grammar({OPEN: lambda trusting: _Tagged()}, DROPPED, bare=_bare, bare_start="{", separators=";")


def _bare() -> Region:
    return Headed(_bare_calls, r'\{\s{0,20}"', r"\{\s{0,20}")


def _bare_calls(raw: str) -> Calls:
    found = members(raw)
    if found is None:
        name = leading_name(raw)
        return [malformed(raw, name)] if name else []
    if text_of(found.get("name")) and any(key in found for key in _KEYS):
        return [object_call(raw, *_KEYS)]
    return []


class _Tagged:
    """What follows the marker: an object, or the rest of the text, in which nothing can be called."""

    def __init__(self) -> None:
        self._object: Region | None = None
        self._hopeless = False

    def scan(self, text: str, start: int, final: bool) -> Scan:
        if self._object is not None:
            return self._object.scan(text, start, final)
        rest = text[start:].lstrip()
        if not self._hopeless and rest.startswith("{"):
            self._object = Bracketed(self.calls)
            return self._object.scan(text, start, final)
        self._hopeless = self._hopeless or bool(rest)
        return Scan(len(text), len(text), "" if final else None)

    def calls(self, raw: str) -> Calls:
        return [object_call(raw, *_KEYS)]
