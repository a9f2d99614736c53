# ruff: noqa: RUF001, RUF002
"""DeepSeek: calls between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`, in two forms.

V3 and R1 write `function<｜tool▁sep｜>NAME`, then the arguments as a fenced block of JSON; V3.1 writes
`NAME<｜tool▁sep｜>{…}`. The markers are single tokens, so none stands in a string; a closing one may be missing.
"""

from __future__ import annotations

from workers.policy.parsing.found import Calls, Found, called, malformed
from workers.policy.parsing.regions import Enclosed, Region
from workers.policy.parsing.schemas import Schemas
from workers.policy.parsing.splitter import Grammar

OPEN = "<｜tool▁call▁begin｜>"
CLOSE = "<｜tool▁call▁end｜>"
ALL_OPEN = "<｜tool▁calls▁begin｜>"
ALL_CLOSE = "<｜tool▁calls▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


def grammar(schemas: Schemas) -> Grammar:
    return Grammar({OPEN: _region}, dropped=(CLOSE, ALL_OPEN, ALL_CLOSE))


def _region(trusting: bool) -> Region:
    return Enclosed(_calls, CLOSE, (OPEN, ALL_CLOSE))


def _calls(raw: str) -> Calls:
    return [_call(raw)]


def _call(raw: str) -> Found:
    head, separator, tail = raw.partition(SEPARATOR)
    if not separator:
        return malformed(raw)
    line, _, rest = tail.partition("\n")
    if head.strip() == "function" and "{" not in line:
        return _named(raw, line.strip(), _unfenced(rest.strip()))
    return _named(raw, head.strip(), tail)


def _unfenced(block: str) -> str:
    return block.removeprefix("```").removeprefix("json").removesuffix("```")


def _named(raw: str, name: str, arguments: str) -> Found:
    """Without any arguments the raw text is shown, which nothing can take for an empty object."""
    return called(name, arguments) if arguments.strip() else malformed(raw, name)
