"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and since version 11 of its tokenizer
`[TOOL_CALLS]name[ARGS]{…}` for each call, with `[CALL_ID]id` before `[ARGS]` in some.
"""

from __future__ import annotations

import re

from workers.policy.tool_calls.parameter_schemas import Schemas
from workers.policy.tool_calls.scanner import Brackets, Delimited, ScanResult
from workers.policy.tool_calls.splitter import Grammar
from workers.policy.tool_calls.tool_call import (
    Calls,
    ParsedToolCall,
    elements,
    from_json,
    from_object,
    leading_name,
    malformed,
)

OPEN = "[TOOL_CALLS]"
_MARKERS = (OPEN, "[ARGS]", "[CALL_ID]")
_TOKEN = re.compile(r"\[TOOL_CALLS\]|\[ARGS\]|\[CALL_ID\]|[\[{]")
_NAME = re.compile(r"[^\s\[\]]+")


def grammar(schemas: Schemas) -> Grammar:
    return Grammar({OPEN: _region})


def _region(trusting: bool) -> Delimited:
    return _Call()


class _Call:
    """A name and its arguments, or an array of calls."""

    def __init__(self) -> None:
        self._brackets: Brackets | None = None
        self._blank = True

    def scan(self, text: str, start: int, final: bool) -> ScanResult:
        at = start
        while self._brackets is None:
            match = _TOKEN.search(text, at)
            if match is None:
                return self._more(text, start, len(text), final)
            mark = match.group()
            if mark == "[" and not final and _is_beginning(text[match.start() :]):
                return self._more(text, start, match.start(), final)
            if mark == OPEN:
                return ScanResult(match.start(), match.start(), OPEN)
            self._blank = self._blank and not text[start : match.start()].strip()
            if mark == "{" or (mark == "[" and self._blank):
                self._brackets = Brackets()
                at = match.start()
            else:
                self._blank = False
                at = match.end()
        at, ended = self._brackets.scan(text, at, final)
        return ScanResult(at, at, "" if ended or final else None)

    def _more(self, text: str, start: int, at: int, final: bool) -> ScanResult:
        self._blank = self._blank and not text[start:at].strip()
        return ScanResult(at, at, "" if final else None)

    def calls(self, raw: str) -> Calls:
        text = raw.strip()
        if text.startswith("["):
            result = elements(text)
            return [from_object(each, "arguments", "parameters") for each in result or ()] or [
                malformed(text, leading_name(text[1:]))
            ]
        return [_named(text)]


def _is_beginning(tail: str) -> bool:
    return any(len(tail) < len(marker) and marker.startswith(tail) for marker in _MARKERS)


def _named(text: str) -> ParsedToolCall:
    brace = text.find("{")
    head = text[: max(brace, 0)].rstrip().removesuffix("[ARGS]")
    name, _, call_id = head.partition("[CALL_ID]")
    if _NAME.fullmatch(name.strip()) is None:
        return malformed(text)
    return from_json(name.strip(), text[brace:], call_id.strip())
