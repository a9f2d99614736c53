"""Calls written as a Python list, as by Llama 4 and some of Llama 3.2: `[f(a=1), g(b="x")]`, at the head of a message.

The text is parsed, never evaluated: arguments are literals, and named. Markers that some models put around the list
(`<|python_start|>`, `<|tool_call_start|>` and similar ones) have no meaning of their own.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from farm.python_syntax import parsed
from workers.policy.tool_calls.scanner import Brackets, Headed
from workers.policy.tool_calls.splitter import Grammar
from workers.policy.tool_calls.tool_call import Calls, ParsedToolCall, malformed

_MARKERS = ("<|python_start|>", "<|python_end|>", "<|python_tag|>", "<|tool_call_start|>", "<|tool_call_end|>")
_HEAD = r"\[\s{0,20}[^\W\d][\w.]{0,99}\("
_BEGINNING = r"\[\s{0,20}(?:[^\W\d][\w.]{0,99})?"
_DEEPEST = 100
_NAME = re.compile(r"\[\s*([^\W\d][\w.]*)\(")
_STRING = re.compile(
    r"""([A-Za-z]{0,2})('{3}(?:[^\\]|\\.)*?'{3}|"{3}(?:[^\\]|\\.)*?"{3}|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""",
    re.DOTALL,
)
_NO_ESCAPE = re.compile(r"\\(?:([^\n\\'\"abfnrtvxuUN0-7])|.)", re.DOTALL)
# Raised by the parser for text that is not Python, is nested too deep, or has too many digits.
_UNPARSABLE = (SyntaxError, ValueError, MemoryError, RecursionError)


def _calls(raw: str) -> Calls:
    head = _NAME.match(raw)
    if head is None:
        return []
    if not _is_closed(raw):
        return [malformed(raw, head.group(1))]
    source = _with_legal_escapes(raw)
    try:
        tree = parsed(source, "eval").body
    except _UNPARSABLE:
        return [malformed(raw, head.group(1))]
    if not isinstance(tree, ast.List):
        return [malformed(raw, head.group(1))]
    segments = _Segments(source)
    return [_call(each, segments) for each in tree.elts]


def _is_closed(raw: str) -> bool:
    """Return whether all strings and brackets are closed, and none is nested too deep for Python's parser."""
    brackets = Brackets(python=True)
    return brackets.scan(raw, 0, final=True) == (len(raw), True) and brackets.deepest <= _DEEPEST


def _with_legal_escapes(source: str) -> str:
    r"""Return the text with `"\d"` written as `"\\d"`, its meaning; Python warns about the former."""

    def legal(match: re.Match[str]) -> str:
        if "r" in match.group(1).lower():
            return match.group()
        return match.group(1) + _NO_ESCAPE.sub(
            lambda escape: "\\" + escape.group() if escape.group(1) else escape.group(), match.group(2)
        )

    return _STRING.sub(legal, source)


def _call(node: ast.expr, segments: _Segments) -> ParsedToolCall:
    name = _dotted(node.func) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or not name or node.args or any(each.arg is None for each in node.keywords):
        return malformed(segments.of(node), name)
    try:
        arguments = json.dumps(
            {str(each.arg): _literal(each.value) for each in node.keywords}, ensure_ascii=False, allow_nan=False
        )
    except (ValueError, RecursionError):
        return malformed(segments.of(node), name)
    return ParsedToolCall(name, arguments)


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal that JSON can represent. Raises ValueError for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _literal(node.operand)
        if type(value) in (int, float):
            return -value if isinstance(node.op, ast.USub) else value
    # JSON's own words, which models use as often as Python's.
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    raise ValueError(f"{type(node).__name__} is not a literal")


_WORDS = {"true": True, "false": False, "null": None}


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("the keys of an object must be strings")


class _Segments:
    def __init__(self, source: str) -> None:
        self._source = source.encode("utf-8", "surrogatepass")
        self._lines = [0]
        for line in self._source.split(b"\n"):
            self._lines.append(self._lines[-1] + len(line) + 1)

    def of(self, node: ast.expr) -> str:
        start = self._lines[node.lineno - 1] + node.col_offset
        end = self._lines[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return self._source[start:end].decode("utf-8", "replace")


GRAMMAR = Grammar(dropped=_MARKERS, bare=lambda: Headed(_calls, _HEAD, _BEGINNING, python=True), bare_start="[")
