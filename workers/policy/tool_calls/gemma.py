"""Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>`, an object whose keys have no quotes.

Text is enclosed in `<|"|>`, a single token, and so has no escapes; numbers, true, false and null are as in JSON.
Reasoning is in the channel `thought`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from workers.policy.tool_calls.scanner import Quotes, enclosed
from workers.policy.tool_calls.splitter import Grammar, Tags
from workers.policy.tool_calls.tool_call import UNREADABLE, Calls, ParsedToolCall, malformed

OPEN = "<|tool_call>"
_CLOSE = "<tool_call|>"
TAGS = Tags("<|channel>thought\n", "<channel|>")
_QUOTE = '<|"|>'
_HEAD = re.compile(r"\s*call:([^\s{}<>|]+)\s*(?=\{)")
_BARE = r"[^{}\[\]:,<>\s](?:[^{}\[\]:,<>]*[^{}\[\]:,<>\s])?"
_TOKEN = re.compile(rf'\s*(?:<\|"\|>(?P<text>.*?)<\|"\|>|(?P<mark>[{{}}\[\]:,])|(?P<bare>{_BARE}))\s*', re.DOTALL)


def _calls(raw: str) -> Calls:
    head = _HEAD.match(raw)
    if head is None:
        return [malformed(raw)]
    try:
        arguments = _Reader(raw[head.end() :]).object()
        return [ParsedToolCall(head[1], json.dumps(arguments, ensure_ascii=False, allow_nan=False))]
    except UNREADABLE:
        return [malformed(raw, head[1])]


class _Reader:
    """Reads one value. All methods raise ValueError for invalid text."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None or match.lastgroup is None:
                raise ValueError("no token")
            self._tokens.append((match.lastgroup, match[match.lastgroup]))
            at = match.end()
        self._tokens.reverse()

    def object(self) -> dict[str, Any]:
        """Return the only object of the text."""
        result = self._value()
        if self._tokens or not isinstance(result, dict):
            raise ValueError("text after the end")
        return result

    def _next(self) -> tuple[str, str]:
        if not self._tokens:
            raise ValueError("no end")
        return self._tokens.pop()

    def _is(self, mark: str) -> bool:
        return bool(self._tokens) and self._tokens[-1] == ("mark", mark)

    def _value(self) -> Any:
        kind, text = self._next()
        if kind == "text":
            return text
        if kind == "bare":
            return json.loads(text)
        if text == "{":
            return self._members()
        if text == "[":
            return self._elements()
        raise ValueError("no value")

    def _members(self) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while not self._is("}"):
            kind, key = self._next()
            if kind == "mark" or key in members or self._next() != ("mark", ":"):
                raise ValueError("no key")
            members[key] = self._value()
            self._past_comma("}")
        self._next()
        return members

    def _elements(self) -> list[Any]:
        elements = []
        while not self._is("]"):
            elements.append(self._value())
            self._past_comma("]")
        self._next()
        return elements

    def _past_comma(self, closer: str) -> None:
        if not self._is(closer) and (self._next() != ("mark", ",") or self._is(closer)):
            raise ValueError("no comma between two")


GRAMMAR = Grammar({OPEN: enclosed(_calls, _CLOSE, (OPEN,), Quotes(_QUOTE, _QUOTE))}, dropped=(_CLOSE,))
