"""gpt-oss: messages in channels. A call is `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}`,
or has its recipient in the head of the message, as its chat template renders earlier calls:
`<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{…}`; there a prompt ends with `assistant`.

`analysis` is reasoning; `final` and a `commentary` without recipient are content. The markers are single tokens, so
none occurs in a string; the closing `<|call|>`, at which sampling ends, may be missing.
"""

from __future__ import annotations

import re

from workers.policy.tool_calls.parameter_schemas import Schemas
from workers.policy.tool_calls.scanner import Delimited, Enclosed, ScanResult
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
_STOPS = ("<|start|>", "<|end|>", CHANNEL)
_TO = "to="
_HEAD = re.compile(
    r"\s*(?:functions\.)?([\w.-]+)\s*(?:<\|channel\|>(?:commentary|analysis)\s*)?"
    r"(?:<\|constrain\|>\s*)?(?:(?:json|code)\s*)?<\|message\|>"
)
_RECIPIENT = re.compile(r"to=[\w.-]{1,256}\s{0,8}<\|channel\|>")
_RECIPIENT_BEGUN = re.compile(r"t|to|to=[\w.-]{0,256}\s{0,8}(?:<(?:\|(?:c(?:h(?:a(?:n(?:n(?:e(?:l\|?)?)?)?)?)?)?)?)?)?")


def grammar(schemas: Schemas) -> Grammar:
    return Grammar(dict.fromkeys(_OPEN, _region), dropped=_DROPPED, bare=_Addressed, bare_start="t")


def _region(trusting: bool) -> Delimited:
    return Enclosed(_calls, _CLOSE, _STOPS)


class _Addressed(Enclosed):
    """A call whose recipient is in the head of its message, before the channel."""

    def __init__(self) -> None:
        super().__init__(self._read, _CLOSE, _STOPS)
        self._sure = False

    def scan(self, text: str, start: int, final: bool) -> ScanResult:
        if self._sure:
            return super().scan(text, start, final)
        head = _RECIPIENT.match(text, start)
        begun = _RECIPIENT_BEGUN.fullmatch(text, start)
        if head is None and begun is not None and not final:
            return ScanResult(start, start)
        self._sure = head is not None or (begun is not None and text.startswith(f"{_TO}functions.", start))
        if not self._sure:
            return ScanResult(start + 1, start + 1, "")
        return super().scan(text, head.end() if head is not None else len(text), final)

    def _read(self, raw: str) -> Calls:
        return _calls(raw.removeprefix(_TO)) if self._sure else []


def _calls(raw: str) -> Calls:
    head = _HEAD.match(raw)
    if head is None:
        return [malformed(raw)]
    arguments = raw[head.end() :]
    return [from_json(head[1], arguments) if arguments.strip() else malformed(raw, head[1])]
