# ruff: noqa: RUF001
"""Formats of tool calls whose arguments are JSON: Hermes, Llama 3, Mistral, DeepSeek, Kimi, gpt-oss, and almost: Gemma.

The markers of DeepSeek, Kimi and gpt-oss are single tokens, so none occurs in a string; a closing one may be missing.
"""

from __future__ import annotations

import json
import re
from typing import Any

from workers.policy.tool_calls.scanner import (
    JSON_STRINGS,
    Bracketed,
    Brackets,
    Delimited,
    Enclosed,
    Headed,
    Quotes,
    ScanResult,
    enclosed,
    held_from,
)
from workers.policy.tool_calls.splitter import Grammar, Tags
from workers.policy.tool_calls.tool_call import (
    UNREADABLE,
    Calls,
    ParsedToolCall,
    elements,
    from_json,
    from_object,
    leading_name,
    malformed,
    members,
    text_of,
)

HERMES_OPEN = "<tool_call>"
HERMES_CLOSE = "</tool_call>"
HERMES = Grammar(
    {
        HERMES_OPEN: enclosed(
            lambda raw: [from_object(raw, "arguments", "parameters")], HERMES_CLOSE, (HERMES_OPEN,), JSON_STRINGS
        )
    },
    dropped=(HERMES_CLOSE,),
)
"""Also of Qwen 2.5 and Qwen 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one per call.

A call without a closing marker is valid if its JSON is complete. A closing marker in a JSON string is text.
"""


def _with_arguments(raw: str, name: str, arguments: str, call_id: str = "") -> ParsedToolCall:
    """Return a call; without arguments it is malformed, with its raw text, instead of having an empty object."""
    return from_json(name, arguments, call_id) if arguments.strip() else malformed(raw, name)


DEEPSEEK_OPEN = "<｜tool▁call▁begin｜>"
DEEPSEEK_ALL_OPEN = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_CLOSE = "<｜tool▁call▁end｜>"
_DEEPSEEK_ALL_CLOSE = "<｜tool▁calls▁end｜>"


def _deepseek_call(raw: str) -> ParsedToolCall:
    head, separator, tail = raw.partition("<｜tool▁sep｜>")
    if not separator:
        return malformed(raw)
    line, _, rest = tail.partition("\n")
    if head.strip() == "function" and "{" not in line:
        block = rest.strip().removeprefix("```").removeprefix("json").removesuffix("```")
        return _with_arguments(raw, line.strip(), block)
    return _with_arguments(raw, head.strip(), tail)


DEEPSEEK = Grammar(
    {DEEPSEEK_OPEN: enclosed(lambda raw: [_deepseek_call(raw)], _DEEPSEEK_CLOSE, (DEEPSEEK_OPEN, _DEEPSEEK_ALL_CLOSE))},
    dropped=(_DEEPSEEK_CLOSE, DEEPSEEK_ALL_OPEN, _DEEPSEEK_ALL_CLOSE),
)
"""Calls between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`, in two forms.

V3 and R1 write `function<｜tool▁sep｜>NAME`, then the arguments as a fenced block of JSON; V3.1 writes
`NAME<｜tool▁sep｜>{…}`.
"""

KIMI_ALL_OPEN = "<|tool_calls_section_begin|>"
_KIMI_ALL_CLOSE = "<|tool_calls_section_end|>"
_KIMI_OPEN = "<|tool_call_begin|>"
_KIMI_CLOSE = "<|tool_call_end|>"
_KIMI_ID = re.compile(r"(?:functions\.)?([^\s:<>]+):\d+")


def _kimi_call(raw: str) -> ParsedToolCall:
    head, separator, arguments = raw.partition("<|tool_call_argument_begin|>")
    call_id = head.strip()
    name = _KIMI_ID.fullmatch(call_id)
    if not separator or name is None:
        return malformed(raw)
    return _with_arguments(raw, name[1], arguments, call_id)


KIMI = Grammar(
    {_KIMI_OPEN: enclosed(lambda raw: [_kimi_call(raw)], _KIMI_CLOSE, (_KIMI_OPEN, _KIMI_ALL_CLOSE))},
    dropped=(_KIMI_CLOSE, KIMI_ALL_OPEN, _KIMI_ALL_CLOSE),
)
"""K2: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`, in one section.

The text before the arguments is the call's id, which its template renders again.
"""

CHANNEL = "<|channel|>"
GPT_OSS_TAGS = Tags("<|channel|>analysis<|message|>", "<|end|>")
_GPT_OSS_CLOSE = "<|call|>"
_GPT_OSS_STOPS = ("<|start|>", "<|end|>", CHANNEL)
_GPT_OSS_HEAD = re.compile(
    r"\s*(?:functions\.)?([\w.-]+)\s*(?:<\|channel\|>(?:commentary|analysis)\s*)?"
    r"(?:<\|constrain\|>\s*)?(?:(?:json|code)\s*)?<\|message\|>"
)
_TO = "to="
_RECIPIENT = re.compile(r"to=[\w.-]{1,256}\s{0,8}<\|channel\|>")
_RECIPIENT_BEGUN = re.compile(r"t|to|to=[\w.-]{0,256}\s{0,8}(?:<(?:\|(?:c(?:h(?:a(?:n(?:n(?:e(?:l\|?)?)?)?)?)?)?)?)?)?")


def _gpt_oss_calls(raw: str) -> Calls:
    head = _GPT_OSS_HEAD.match(raw)
    return [malformed(raw) if head is None else _with_arguments(raw, head[1], raw[head.end() :])]


class _Addressed(Enclosed):
    """A call whose recipient is in the head of its message, before the channel."""

    def __init__(self) -> None:
        super().__init__(self._read, _GPT_OSS_CLOSE, _GPT_OSS_STOPS)
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
        return _gpt_oss_calls(raw.removeprefix(_TO)) if self._sure else []


GPT_OSS = Grammar(
    dict.fromkeys(
        ("<|channel|>commentary to=", "<|channel|>analysis to="),
        enclosed(_gpt_oss_calls, _GPT_OSS_CLOSE, _GPT_OSS_STOPS),
    ),
    dropped=(
        *("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
        *("<|end|>", "<|return|>", _GPT_OSS_CLOSE),
    ),
    bare=_Addressed,
    bare_start="t",
)
"""Messages in channels. A call is `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}`, or has its
recipient in the head of the message, as its chat template renders earlier calls:
`<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{…}`; there a prompt ends with `assistant`.

`analysis` is reasoning; `final` and a `commentary` without recipient are content. Sampling ends at `<|call|>`.
"""

PYTHON_TAG = "<|python_tag|>"
_LLAMA_KEYS = ("parameters", "arguments")


def _bare_calls(raw: str) -> Calls:
    fields = members(raw)
    if fields is None:
        name = leading_name(raw)
        return [malformed(raw, name)] if name else []
    if text_of(fields.get("name")) and any(key in fields for key in _LLAMA_KEYS):
        return [from_object(raw, *_LLAMA_KEYS)]
    return []


class _Tagged:
    """The region after the marker: an object, or else the rest of the text as a malformed call."""

    def __init__(self) -> None:
        self._object: Delimited | None = None
        self._hopeless = False

    def scan(self, text: str, start: int, final: bool) -> ScanResult:
        if self._object is not None:
            return self._object.scan(text, start, final)
        rest = text[start:].lstrip()
        if not self._hopeless and rest.startswith("{"):
            self._object = Bracketed(self.calls)
            return self._object.scan(text, start, final)
        self._hopeless = self._hopeless or bool(rest)
        return ScanResult(len(text), len(text), "" if final else None)

    def calls(self, raw: str) -> Calls:
        return [from_object(raw, *_LLAMA_KEYS)]


LLAMA3 = Grammar(
    {PYTHON_TAG: lambda trusting: _Tagged()},
    # Markers around the calls of Llama 4.
    dropped=("<|python_start|>", "<|python_end|>"),
    bare=lambda: Headed(_bare_calls, r'\{\s{0,20}"', r"\{\s{0,20}"),
    bare_start="{",
    separators=";",
)
"""`{"name": …, "parameters": {…}}`, or several separated by `;`, `<|python_tag|>` before or not.

Without that marker, only an object at the start of the content is a call, and only with a name and parameters; any
other is an answer in JSON. With it, any other text is a malformed call.
"""

MISTRAL_OPEN = "[TOOL_CALLS]"
_MISTRAL_MARKERS = (MISTRAL_OPEN, "[ARGS]", "[CALL_ID]")
_MISTRAL_TOKEN = re.compile(r"\[TOOL_CALLS\]|\[ARGS\]|\[CALL_ID\]|[\[{]")
_MISTRAL_NAME = re.compile(r"[^\s\[\]]+")


class _MistralCall:
    """A name and its arguments, or an array of calls."""

    def __init__(self) -> None:
        self._brackets: Brackets | None = None
        self._blank = True

    def scan(self, text: str, start: int, final: bool) -> ScanResult:
        at = start
        while self._brackets is None:
            match = _MISTRAL_TOKEN.search(text, at)
            if match is None:
                return self._more(text, start, len(text), final)
            mark = match.group()
            if mark == "[" and not final and held_from(text, match.start(), _MISTRAL_MARKERS) == match.start():
                return self._more(text, start, match.start(), final)
            if mark == MISTRAL_OPEN:
                return ScanResult(match.start(), match.start(), MISTRAL_OPEN)
            self._blank = self._blank and not text[start : match.start()].strip()
            if mark == "{" or (mark == "[" and self._blank):
                self._brackets = Brackets()
                at = match.start()
            else:
                self._blank = False
                at = match.end()
        at, ended = self._brackets.scan(text, at, final)
        return ScanResult(at, at, "" if ended or final else None)

    def _more(self, text: str, start: int, at: int, final: bool) -> ScanResult:
        self._blank = self._blank and not text[start:at].strip()
        return ScanResult(at, at, "" if final else None)

    def calls(self, raw: str) -> Calls:
        text = raw.strip()
        if text.startswith("["):
            objects = elements(text)
            return [from_object(each, "arguments", "parameters") for each in objects or ()] or [
                malformed(text, leading_name(text[1:]))
            ]
        brace = text.find("{")
        head = text[: max(brace, 0)].rstrip().removesuffix("[ARGS]")
        name, _, call_id = head.partition("[CALL_ID]")
        if _MISTRAL_NAME.fullmatch(name.strip()) is None:
            return [malformed(text)]
        return [from_json(name.strip(), text[brace:], call_id.strip())]


MISTRAL = Grammar({MISTRAL_OPEN: lambda trusting: _MistralCall()})
"""`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and since version 11 of its tokenizer
`[TOOL_CALLS]name[ARGS]{…}` for each call, with `[CALL_ID]id` before `[ARGS]` in some.
"""


GEMMA_OPEN = "<|tool_call>"
_GEMMA_CLOSE = "<tool_call|>"
GEMMA_TAGS = Tags("<|channel>thought\n", "<channel|>")
_GEMMA_QUOTE = '<|"|>'
_GEMMA_HEAD = re.compile(r"\s*call:([^\s{}<>|]+)\s*(?=\{)")
_GEMMA_BARE = r"[^{}\[\]:,<>\s](?:[^{}\[\]:,<>]*[^{}\[\]:,<>\s])?"
_GEMMA_TOKEN = re.compile(
    rf'\s*(?:<\|"\|>(?P<text>.*?)<\|"\|>|(?P<mark>[{{}}\[\]:,])|(?P<bare>{_GEMMA_BARE}))\s*', re.DOTALL
)


def _gemma_calls(raw: str) -> Calls:
    head = _GEMMA_HEAD.match(raw)
    if head is None:
        return [malformed(raw)]
    try:
        arguments = _GemmaReader(raw[head.end() :]).object()
        return [ParsedToolCall(head[1], json.dumps(arguments, ensure_ascii=False, allow_nan=False))]
    except UNREADABLE:
        return [malformed(raw, head[1])]


class _GemmaReader:
    """Reads one value. All methods raise ValueError for invalid text."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text):
            match = _GEMMA_TOKEN.match(text, at)
            if match is None or match.lastgroup is None:
                raise ValueError("no token")
            self._tokens.append((match.lastgroup, match[match.lastgroup]))
            at = match.end()
        self._tokens.reverse()

    def object(self) -> dict[str, Any]:
        """Return the only object of the text."""
        value = self._value()
        if self._tokens or not isinstance(value, dict):
            raise ValueError("text after the end")
        return value

    def _next(self) -> tuple[str, str]:
        if not self._tokens:
            raise ValueError("no end")
        return self._tokens.pop()

    def _is(self, mark: str) -> bool:
        return bool(self._tokens) and self._tokens[-1] == ("mark", mark)

    def _value(self) -> Any:
        kind, text = self._next()
        if kind == "text":
            return text
        if kind == "bare":
            return json.loads(text)
        if text == "{":
            return self._members()
        if text == "[":
            return self._elements()
        raise ValueError("no value")

    def _members(self) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while not self._is("}"):
            kind, key = self._next()
            if kind == "mark" or key in members or self._next() != ("mark", ":"):
                raise ValueError("no key")
            members[key] = self._value()
            self._past_comma("}")
        self._next()
        return members

    def _elements(self) -> list[Any]:
        elements = []
        while not self._is("]"):
            elements.append(self._value())
            self._past_comma("]")
        self._next()
        return elements

    def _past_comma(self, closer: str) -> None:
        if not self._is(closer) and (self._next() != ("mark", ",") or self._is(closer)):
            raise ValueError("no comma between two")


GEMMA = Grammar(
    {GEMMA_OPEN: enclosed(_gemma_calls, _GEMMA_CLOSE, (GEMMA_OPEN,), Quotes(_GEMMA_QUOTE, _GEMMA_QUOTE))},
    dropped=(_GEMMA_CLOSE,),
)
"""4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>`, an object whose keys have no quotes.

Text is enclosed in `<|"|>`, a single token, and so has no escapes; numbers, true, false and null are as in JSON.
Reasoning is in the channel `thought`.
"""
