"""Hermes, as Qwen 2.5 and Qwen 3 write it: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one for each call.

A call whose closing marker is missing counts if its JSON is whole. A closing marker in a JSON string is text.
"""

from __future__ import annotations

from workers.policy.parsing.found import Calls, object_call
from workers.policy.parsing.regions import JSON_STRINGS, Enclosed, Region
from workers.policy.parsing.schemas import Schemas
from workers.policy.parsing.splitter import Grammar

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def grammar(schemas: Schemas) -> Grammar:
    return Grammar({OPEN: _region}, dropped=(CLOSE,))


def _region(trusting: bool) -> Region:
    return Enclosed(_calls, CLOSE, (OPEN,), JSON_STRINGS, trusting)


def _calls(raw: str) -> Calls:
    return [object_call(raw, "arguments", "parameters")]
