"""Hermes, the format of Qwen 2.5 and Qwen 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one per call.

A call without a closing marker is valid if its JSON is complete. A closing marker in a JSON string is text.
"""

from __future__ import annotations

from workers.policy.tool_calls.parameter_schemas import Schemas
from workers.policy.tool_calls.scanner import JSON_STRINGS, Delimited, Enclosed
from workers.policy.tool_calls.splitter import Grammar
from workers.policy.tool_calls.tool_call import Calls, from_object

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def grammar(schemas: Schemas) -> Grammar:
    return Grammar({OPEN: _region}, dropped=(CLOSE,))


def _region(trusting: bool) -> Delimited:
    return Enclosed(_calls, CLOSE, (OPEN,), JSON_STRINGS, trusting)


def _calls(raw: str) -> Calls:
    return [from_object(raw, "arguments", "parameters")]
