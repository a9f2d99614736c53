"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and since version 11 of its tokenizer
`[TOOL_CALLS]name[ARGS]{…}` for each call, with `[CALL_ID]id` before `[ARGS]` in some.
"""

from __future__ import annotations

import re

from workers.policy.parsing.found import Calls, Found, called, elements, leading_name, malformed, object_call
from workers.policy.parsing.regions import Brackets, Region, Scan
from workers.policy.parsing.schemas import Schemas
from workers.policy.parsing.splitter import Grammar

OPEN = "[TOOL_CALLS]"
_MARKERS = (OPEN, "[ARGS]", "[CALL_ID]")
_TOKEN = re.compile(r"\[TOOL_CALLS\]|\[ARGS\]|\[CALL_ID\]|[\[{]")
_NAME = re.compile(r"[^\s\[\]]+")


def grammar(schemas: Schemas) -> Grammar:
    return Grammar({OPEN: _region})


def _region(trusting: bool) -> Region:
    return _Call()


class _Call:
    """A name and its arguments, or an array of calls."""

    def __init__(self) -> None:
        self._brackets: Brackets | None = None
        self._blank = True

    def scan(self, text: str, start: int, final: bool) -> Scan:
        at = start
        while self._brackets is None:
            match = _TOKEN.search(text, at)
            if match is None:
                return self._more(text, start, len(text), final)
            mark = match.group()
            if mark == "[" and not final and _is_beginning(text[match.start() :]):
                return self._more(text, start, match.start(), final)
            if mark == OPEN:
                return Scan(match.start(), match.start(), OPEN)
            self._blank = self._blank and not text[start : match.start()].strip()
            if mark == "{" or (mark == "[" and self._blank):
                self._brackets = Brackets()
                at = match.start()
            else:
                self._blank = False
                at = match.end()
        at, ended = self._brackets.scan(text, at, final)
        return Scan(at, at, "" if ended or final else None)

    def _more(self, text: str, start: int, at: int, final: bool) -> Scan:
        self._blank = self._blank and not text[start:at].strip()
        return Scan(at, at, "" if final else None)

    def calls(self, raw: str) -> Calls:
        text = raw.strip()
        if text.startswith("["):
            found = elements(text)
            return [object_call(each, "arguments", "parameters") for each in found or ()] or [
                malformed(text, leading_name(text[1:]))
            ]
        return [_named(text)]


def _is_beginning(tail: str) -> bool:
    return any(len(tail) < len(marker) and marker.startswith(tail) for marker in _MARKERS)


def _named(text: str) -> Found:
    brace = text.find("{")
    head = text[: max(brace, 0)].rstrip().removesuffix("[ARGS]")
    name, _, call_id = head.partition("[CALL_ID]")
    if _NAME.fullmatch(name.strip()) is None:
        return malformed(text)
    return called(name.strip(), text[brace:], call_id.strip())
