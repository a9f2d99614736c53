"""gpt-oss: messages in channels. A call is `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}`.

`analysis` is reasoning, `final` and a `commentary` to nobody are content. The markers are single tokens, so none stands
in a string; the closing `<|call|>`, at which sampling ends, may be missing.
"""

from __future__ import annotations

import re

from workers.policy.tool_calls.parameter_schemas import Schemas
from workers.policy.tool_calls.scanner import Delimited, Enclosed
from workers.policy.tool_calls.splitter import Grammar, Tags
from workers.policy.tool_calls.tool_call import Calls, from_json, malformed

CHANNEL = "<|channel|>"
TAGS = Tags("<|channel|>analysis<|message|>", "<|end|>")
_OPEN = ("<|channel|>commentary to=", "<|channel|>analysis to=")
_CLOSE = "<|call|>"
_DROPPED = (
    *("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
    *("<|end|>", "<|return|>", _CLOSE),
)
_HEAD = re.compile(r"\s*(?:functions\.)?([\w.-]+)\s*(?:<\|constrain\|>\s*)?(?:(?:json|code)\s*)?<\|message\|>")


def grammar(schemas: Schemas) -> Grammar:
    return Grammar(dict.fromkeys(_OPEN, _region), dropped=_DROPPED)


def _region(trusting: bool) -> Delimited:
    return Enclosed(_calls, _CLOSE, ("<|start|>", "<|end|>", CHANNEL))


def _calls(raw: str) -> Calls:
    head = _HEAD.match(raw)
    if head is None:
        return [malformed(raw)]
    arguments = raw[head.end() :]
    return [from_json(head[1], arguments) if arguments.strip() else malformed(raw, head[1])]
