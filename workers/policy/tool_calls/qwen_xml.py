"""Qwen3-Coder: `<tool_call><function=NAME><parameter=P>value</parameter></function></tool_call>`, values as plain text.

The outer marker may be missing, as it often is. A value loses one line break at each end. Its type follows from the
tool's schema, where that is known (`parameter_schemas.py`). A value may hold anything but its own closing marker right
before another parameter or the end.
"""

from __future__ import annotations

import json
import re
from functools import partial

from workers.policy.tool_calls.parameter_schemas import Schemas, as_json
from workers.policy.tool_calls.scanner import Delimited, Enclosed, Quotes
from workers.policy.tool_calls.splitter import Grammar
from workers.policy.tool_calls.tool_call import Calls, ParsedToolCall, malformed

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
END = "</function>"
_VALUES = Quotes("<parameter=", "</parameter>")
_NAME = re.compile(r"\s*<function=([^<>\n]*)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>")
_VALUE_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>|\Z)")


def grammar(schemas: Schemas) -> Grammar:
    whole = partial(_calls, schemas=schemas)

    def enclosed(trusting: bool) -> Delimited:
        return Enclosed(whole, CLOSE, (OPEN,), _VALUES, trusting)

    def unenclosed(trusting: bool) -> Delimited:
        return Enclosed(lambda raw: whole(FUNCTION + raw), END, (OPEN, FUNCTION), _VALUES, trusting)

    return Grammar({OPEN: enclosed, FUNCTION: unenclosed}, dropped=(CLOSE, END))


def _calls(raw: str, schemas: Schemas) -> Calls:
    return [_call(raw, schemas)]


def _call(raw: str, schemas: Schemas) -> ParsedToolCall:
    head = _NAME.match(raw)
    name = head.group(1).strip() if head else ""
    if head is None or not name:
        return malformed(raw)
    known = schemas.get(name, {})
    values: dict[str, str] = {}
    at = head.end()
    while (parameter := _PARAMETER.match(raw, at)) is not None:
        end = _VALUE_END.search(raw, parameter.end())
        if end is None:
            return malformed(raw, name)
        key = parameter.group(1).strip()
        values[key] = as_json(_text(raw[parameter.end() : end.start()]), known.get(key))
        at = end.end()
    if raw[at:].strip() not in {"", END}:
        return malformed(raw, name)
    return ParsedToolCall(name, "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in values.items()) + "}")


def _text(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")
