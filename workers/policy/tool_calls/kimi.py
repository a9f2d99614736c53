"""Kimi K2: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`, in one section.

The text before the arguments is the call's id, which its template renders again. The markers are single tokens, so none
occurs in a string; a closing one may be missing.
"""

from __future__ import annotations

import re

from workers.policy.tool_calls.parameter_schemas import Schemas
from workers.policy.tool_calls.scanner import Delimited, Enclosed
from workers.policy.tool_calls.splitter import Grammar
from workers.policy.tool_calls.tool_call import Calls, from_json, malformed

OPEN = "<|tool_call_begin|>"
CLOSE = "<|tool_call_end|>"
ALL_OPEN = "<|tool_calls_section_begin|>"
ALL_CLOSE = "<|tool_calls_section_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"(?:functions\.)?([^\s:<>]+):\d+")


def grammar(schemas: Schemas) -> Grammar:
    return Grammar({OPEN: _region}, dropped=(CLOSE, ALL_OPEN, ALL_CLOSE))


def _region(trusting: bool) -> Delimited:
    return Enclosed(_calls, CLOSE, (OPEN, ALL_CLOSE))


def _calls(raw: str) -> Calls:
    head, separator, arguments = raw.partition(_ARGUMENTS)
    call_id = head.strip()
    name = _ID.fullmatch(call_id)
    if not separator or name is None:
        return [malformed(raw)]
    return [from_json(name[1], arguments, call_id) if arguments.strip() else malformed(raw, name[1])]
