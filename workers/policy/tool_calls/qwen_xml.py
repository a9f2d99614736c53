"""Qwen3-Coder: `<tool_call><function=NAME><parameter=P>value</parameter></function></tool_call>`, values as plain text.

The outer marker is often missing. A value loses one line break at each end. Its type follows from the tool's schema, if
known (`parameter_schemas.py`).
"""

from __future__ import annotations

import re

from workers.policy.tool_calls.parameter_schemas import Schemas
from workers.policy.tool_calls.splitter import Grammar
from workers.policy.tool_calls.tagged_parameters import TaggedParameters

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
END = "</function>"
_FORM = TaggedParameters(
    head=re.compile(r"\s*<function=([^<>\n]*)>\s*"),
    parameter=re.compile(r"<parameter=([^<>\n]*)>"),
    opening="<parameter=",
    closing="</parameter>",
    end=END,
    wrapped=True,
)


def grammar(schemas: Schemas) -> Grammar:
    enclosed = _FORM.region(schemas, CLOSE, (OPEN,))
    unenclosed = _FORM.region(schemas, END, (OPEN, FUNCTION), before=FUNCTION)
    return Grammar({OPEN: enclosed, FUNCTION: unenclosed}, dropped=(CLOSE, END), strays=_FORM.tags)
