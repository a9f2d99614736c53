# ruff: noqa: RUF001, RUF002
"""DeepSeek: calls between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`, in two forms.

V3 and R1 write `function<｜tool▁sep｜>NAME`, then the arguments as a fenced block of JSON; V3.1 writes
`NAME<｜tool▁sep｜>{…}`. The markers are single tokens, so none stands in a string; a closing one may be missing.
"""

from __future__ import annotations

from workers.policy.tool_calls.parameter_schemas import Schemas
from workers.policy.tool_calls.scanner import Delimited, Enclosed
from workers.policy.tool_calls.splitter import Grammar
from workers.policy.tool_calls.tool_call import Calls, ParsedToolCall, from_json, malformed

OPEN = "<｜tool▁call▁begin｜>"
CLOSE = "<｜tool▁call▁end｜>"
ALL_OPEN = "<｜tool▁calls▁begin｜>"
ALL_CLOSE = "<｜tool▁calls▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


def grammar(schemas: Schemas) -> Grammar:
    return Grammar({OPEN: _region}, dropped=(CLOSE, ALL_OPEN, ALL_CLOSE))


def _region(trusting: bool) -> Delimited:
    return Enclosed(_calls, CLOSE, (OPEN, ALL_CLOSE))


def _calls(raw: str) -> Calls:
    return [_call(raw)]


def _call(raw: str) -> ParsedToolCall:
    head, separator, tail = raw.partition(SEPARATOR)
    if not separator:
        return malformed(raw)
    line, _, rest = tail.partition("\n")
    if head.strip() == "function" and "{" not in line:
        return _named(raw, line.strip(), _unfenced(rest.strip()))
    return _named(raw, head.strip(), tail)


def _unfenced(block: str) -> str:
    return block.removeprefix("```").removeprefix("json").removesuffix("```")


def _named(raw: str, name: str, arguments: str) -> ParsedToolCall:
    """Return a call; without arguments it is malformed, with its raw text, instead of having an empty object."""
    return from_json(name, arguments) if arguments.strip() else malformed(raw, name)
