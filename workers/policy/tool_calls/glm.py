"""GLM 4.5 and later: `<tool_call>NAME`, `<arg_key>P</arg_key><arg_value>value</arg_value>` each, `</tool_call>`.

Values are plain text or JSON, by the tool's schema (`parameter_schemas.py`).
"""

from __future__ import annotations

import re

from workers.policy.tool_calls.parameter_schemas import Schemas
from workers.policy.tool_calls.splitter import Grammar
from workers.policy.tool_calls.tagged_parameters import TaggedParameters

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
KEY = "<arg_key>"
_FORM = TaggedParameters(
    head=re.compile(r"\s*([^\s<>{}]+)\s*"),
    parameter=re.compile(r"<arg_key>([^<>\n]*)</arg_key>\s*<arg_value>"),
    opening=KEY,
    value="<arg_value>",
    closing="</arg_value>",
)


def grammar(schemas: Schemas) -> Grammar:
    return Grammar({OPEN: _FORM.region(schemas, CLOSE, (OPEN,))}, dropped=(CLOSE,), strays=_FORM.tags)
