"""Qwen3-Coder: `<tool_call><function=NAME><parameter=P>value</parameter></function></tool_call>`, values as plain text.

The outer marker may be missing, as it often is. A value loses one line break at each end. Its type follows from the
tool's schema, where that is known (`parameter_schemas.py`).
"""

from __future__ import annotations

import re

from workers.policy.tool_calls.parameter_schemas import Schemas
from workers.policy.tool_calls.scanner import Delimited, Enclosed
from workers.policy.tool_calls.splitter import Grammar
from workers.policy.tool_calls.tagged_parameters import TaggedParameters
from workers.policy.tool_calls.tool_call import Calls

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
    def whole(raw: str) -> Calls:
        return [_FORM.call(raw, schemas)]

    def unfinished(raw: str) -> Calls:
        return [_FORM.unfinished(raw, schemas)]

    def enclosed(trusting: bool) -> Delimited:
        return Enclosed(whole, CLOSE, (OPEN,), _FORM.quotes, trusting, unfinished)

    def unenclosed(trusting: bool) -> Delimited:
        return Enclosed(
            lambda raw: whole(FUNCTION + raw),
            END,
            (OPEN, FUNCTION),
            _FORM.quotes,
            trusting,
            lambda raw: unfinished(FUNCTION + raw),
        )

    return Grammar({OPEN: enclosed, FUNCTION: unenclosed}, dropped=(CLOSE, END), strays=_FORM.tags)
