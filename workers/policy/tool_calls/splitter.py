"""A streaming parser of sampled text: reasoning, tool calls, and the content around them.

The same reader serves whole texts and streams, so they cannot differ. Its guarantees:

- Reasoning is the text between its tags; after an unclosed tag, all text is reasoning. Tool calls in it are ignored.
- Text before, between and after tool calls is content. Whitespace next to a marker is removed with it; pieces of
  content, or of reasoning, that markers separate are joined by a line break. Text without a marker is unchanged.
- A closing marker on its own is dropped.
- It never raises, and its time is linear in the length of the text.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from farm.records.trajectory import Message, ToolCall
from workers.plugins.interfaces import Delta
from workers.policy.tool_calls.scanner import Delimited, ScanResult, any_of, held_from

_BLANK = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A sampled text in its parts. An unreadable call has its raw text as arguments; `n_invalid` counts them."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    n_invalid: int


@dataclass(frozen=True, slots=True)
class Grammar:
    """The markers of tool calls in one format.

    `openers` makes a region for a marker, given whether quotes in it can be trusted. `bare` makes one for calls without
    an opening marker: only at the start of the content, at the character `bare_start`, and after an earlier call,
    separated from it by `separators`. `dropped` are markers without a meaning of their own. `strays` occur only in
    calls: one that follows a call shows that a marker in a value ended it too early, so that call is malformed.
    """

    openers: Mapping[str, Callable[[bool], Delimited]] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    bare: Callable[[], Delimited] | None = None
    bare_start: str = ""
    separators: str = ""
    strays: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tags:
    """The opening and the closing tag of reasoning."""

    opening: str
    closing: str


class _Channel:
    """An output channel, of content or reasoning, without the whitespace next to markers; appends to `deltas`."""

    def __init__(self, deltas: list[Delta], *, reasoning: bool) -> None:
        self._deltas = deltas
        self._reasoning = reasoning
        self._parts: list[str] = []
        self._held: list[str] = []
        self._strip = False
        self.begun = False

    def feed(self, text: str) -> None:
        """Take more text, and pass on what can be passed on now."""
        if self._strip:
            text = text.lstrip()
            if not text:
                return
            self._strip = False
            if self.begun:
                text = "\n" + text
        body = text.rstrip()
        if not body:
            self._held.append(text)
            return
        out = "".join([*self._held, body])
        self._held = [text[len(body) :]]
        self._out(out)

    def meet_marker(self) -> None:
        self._held = []
        self._strip = True

    def end(self) -> None:
        self._out("".join(self._held))
        self._held = []

    def _out(self, text: str) -> None:
        self.begun = self.begun or bool(text.strip())
        self._parts.append(text)
        if text:
            self._deltas.append(Delta(text, self._reasoning))

    def whole(self) -> str:
        return "".join(self._parts)


class Splitter:
    """The parser of one sampled text, in pieces of any size."""

    def __init__(self, grammar: Grammar, tags: tuple[Tags, ...], opened: bool) -> None:
        self._grammar = grammar
        self._tags = {each.opening: each for each in tags}
        self._markers = (*self._tags, *grammar.openers, *grammar.dropped, *grammar.strays)
        self._text = ""
        self._at = 0
        self._deltas: list[Delta] = []
        self._content = _Channel(self._deltas, reasoning=False)
        self._reasoning = _Channel(self._deltas, reasoning=True)
        self._calls: list[ToolCall] = []
        self._n_invalid = 0
        self._last_raw: str | None = None
        self._thinking: Tags | None = tags[0] if opened else None
        # A model may repeat the tag that its prompt opened.
        self._may_repeat = opened
        self._region: Delimited | None = None
        self._raw: list[str] = []
        self._trusting = True
        self._fresh = True
        self._after_call = False
        if opened:
            self._meet_marker()

    def feed(self, text: str) -> list[Delta]:
        """Take more text; return the parts now known to be content or reasoning, in order."""
        return self._read(text, final=False)

    def end(self) -> list[Delta]:
        """End the text; return the remaining deltas."""
        self._read("", final=True)
        self._reasoning.end()
        self._content.end()
        return self._taken()

    def parsed(self) -> Parsed:
        """Return the parts of the whole text, once it has ended."""
        return Parsed(self._content.whole(), self._reasoning.whole(), tuple(self._calls), self._n_invalid)

    def _read(self, text: str, final: bool) -> list[Delta]:
        self._text = self._text[self._at :] + text
        self._at = 0
        while self._step(final):
            pass
        return [] if final else self._taken()

    def _taken(self) -> list[Delta]:
        deltas = self._deltas.copy()
        self._deltas.clear()
        return deltas

    def _step(self, final: bool) -> bool:
        """Read one stretch of text; False if nothing more can be read now."""
        if self._region is not None:
            return self._in_region(self._region, final)
        if self._thinking is not None:
            return self._in_reasoning(self._thinking, final)
        return self._outside(final)

    def _outside(self, final: bool) -> bool:
        if self._fresh and self._grammar.bare is not None and self._at_bare_call():
            self._region = self._grammar.bare()
            return True
        marker = self._up_to((*self._markers,), final, self._take_content)
        if marker is None:
            return False
        if marker in self._grammar.strays:
            self._doubt_last_call()
            self._take_content(marker)
            return True
        self._meet_marker()
        if marker in self._tags:
            self._thinking = self._tags[marker]
        elif marker in self._grammar.openers:
            self._region = self._grammar.openers[marker](self._trusting)
        else:
            self._fresh = True
        return True

    def _at_bare_call(self) -> bool:
        """Return whether a call without an opening marker may begin here, past blanks."""
        separators = re.escape(self._grammar.separators) if self._after_call else ""
        blank = re.compile(rf"[\s{separators}]*").match(self._text, self._at)
        assert blank is not None
        if not self._after_call:
            self._content.feed(blank.group())
        self._at = blank.end()
        return self._text.startswith(self._grammar.bare_start, self._at)

    def _take_content(self, text: str) -> None:
        if not text.isspace():
            self._fresh = self._after_call = False
        self._content.feed(text)

    def _in_reasoning(self, tags: Tags, final: bool) -> bool:
        if self._may_repeat and not self._skip_repeated(tags.opening, final):
            return False
        marker = self._up_to((tags.closing,), final, self._reasoning.feed)
        if marker is None:
            return False
        self._meet_marker()
        self._thinking = None
        self._fresh = not self._content.begun
        return True

    def _skip_repeated(self, opening: str, final: bool) -> bool:
        """Skip a repeated opening tag; False while the text may still become one."""
        blank = _BLANK.match(self._text, self._at)
        assert blank is not None
        start = blank.end()
        if not final and opening.startswith(self._text[start : start + len(opening)]):
            self._at = start
            if len(self._text) - start < len(opening):
                return False
        if self._text.startswith(opening, start):
            self._at = start + len(opening)
        self._may_repeat = False
        return True

    def _up_to(self, markers: tuple[str, ...], final: bool, take: Callable[[str], None]) -> str | None:
        """Take the text before the next marker, which is returned; without one, all text that cannot begin one."""
        match = any_of(markers).search(self._text, self._at) if markers else None
        if match is not None:
            stop = match.start()
        else:
            stop = len(self._text) if final else held_from(self._text, self._at, markers)
        if stop > self._at:
            take(self._text[self._at : stop])
        self._at = match.end() if match is not None else stop
        return match.group() if match is not None else None

    def _in_region(self, region: Delimited, final: bool) -> bool:
        scan = region.scan(self._text, self._at, final)
        self._raw.append(self._text[self._at : scan.taken])
        self._at = scan.resume
        if scan.ended_by is None:
            return False
        raw = "".join(self._raw)
        self._region, self._raw = None, []
        if scan.back is not None:
            self._text = raw[scan.back + scan.skip :] + self._text[self._at :]
            self._at = 0
            self._trusting = False
            raw = raw[: scan.back]
        self._take_calls(region, raw, scan)
        return True

    def _take_calls(self, region: Delimited, raw: str, scan: ScanResult) -> None:
        # A marker repeated at once opens one call, not two.
        if raw.strip() or scan.ended_by not in self._grammar.openers:
            parsed_tool_calls = region.calls(raw)
            if not parsed_tool_calls:
                self._take_content(raw)
                return
            for each in parsed_tool_calls:
                self._calls.append(ToolCall(each.call_id, each.name, each.arguments))
                self._n_invalid += not each.valid
                self._last_raw = raw if each.valid else None
        self._meet_marker()
        self._fresh = self._after_call = True

    def _doubt_last_call(self) -> None:
        if self._last_raw is not None:
            last = self._calls[-1]
            self._calls[-1] = ToolCall(last.call_id, last.name, self._last_raw.strip())
            self._n_invalid += 1
            self._last_raw = None

    def _meet_marker(self) -> None:
        self._content.meet_marker()
        self._reasoning.meet_marker()


_ALPHABET = string.ascii_letters + string.digits
_ID_CHARS = 9
"""Length of a call id: required by Mistral's templates; others accept any length."""


def message(parsed: Parsed) -> Message:
    """Return the assistant message; every tool call has an id, a malformed one its raw text as arguments."""
    made: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        made["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.call_id or "".join(secrets.choice(_ALPHABET) for _ in range(_ID_CHARS)),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.tool_calls
        ]
    return made


def deltas(message: Message) -> list[Delta]:
    """Return the text of a whole message as the deltas of a stream."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    content = message.get("content")
    pieces = [Delta(reasoning, reasoning=True)] if isinstance(reasoning, str) and reasoning else []
    return [*pieces, Delta(content)] if isinstance(content, str) and content else pieces
