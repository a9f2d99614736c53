"""Llama 3: `{"name": …, "parameters": {…}}`, or several separated by `;`, `<|python_tag|>` before or not.

Without that marker, only an object at the start of the content is a call, and only with a name and parameters; any
other is an answer in JSON. With it, any other text is a malformed call.
"""

from __future__ import annotations

from workers.policy.tool_calls.parameter_schemas import Schemas
from workers.policy.tool_calls.scanner import Bracketed, Delimited, Headed, ScanResult
from workers.policy.tool_calls.splitter import Grammar
from workers.policy.tool_calls.tool_call import Calls, from_object, leading_name, malformed, members, text_of

OPEN = "<|python_tag|>"
DROPPED = ("<|python_start|>", "<|python_end|>")
"""Markers around the calls of Llama 4."""
_KEYS = ("parameters", "arguments")


def grammar(schemas: Schemas) -> Grammar:
    return Grammar({OPEN: lambda trusting: _Tagged()}, DROPPED, bare=_bare, bare_start="{", separators=";")


def _bare() -> Delimited:
    return Headed(_bare_calls, r'\{\s{0,20}"', r"\{\s{0,20}")


def _bare_calls(raw: str) -> Calls:
    result = members(raw)
    if result is None:
        name = leading_name(raw)
        return [malformed(raw, name)] if name else []
    if text_of(result.get("name")) and any(key in result for key in _KEYS):
        return [from_object(raw, *_KEYS)]
    return []


class _Tagged:
    """The region after the marker: an object, or else the rest of the text as a malformed call."""

    def __init__(self) -> None:
        self._object: Delimited | None = None
        self._hopeless = False

    def scan(self, text: str, start: int, final: bool) -> ScanResult:
        if self._object is not None:
            return self._object.scan(text, start, final)
        rest = text[start:].lstrip()
        if not self._hopeless and rest.startswith("{"):
            self._object = Bracketed(self.calls)
            return self._object.scan(text, start, final)
        self._hopeless = self._hopeless or bool(rest)
        return ScanResult(len(text), len(text), "" if final else None)

    def calls(self, raw: str) -> Calls:
        return [from_object(raw, *_KEYS)]
