"""Scanners for the end of a tool call in streamed text: by its closing marker, or by its brackets.

Every region reads each character once, whatever the pieces, and holds back only a possible beginning of a marker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias

from workers.policy.tool_calls.tool_call import Calls


@dataclass(frozen=True, slots=True)
class ScanResult:
    """The extent of a region in the available text: it reaches up to `taken`; the following text begins at `resume`.

    `ended_by` is the marker that ended it, None while it goes on, empty at the end of all text or at the last bracket.
    `back`: the region ended long before; its text is that long, `skip` characters of a marker follow, and then text
    that does not belong to it.
    """

    taken: int
    resume: int
    ended_by: str | None = None
    back: int | None = None
    skip: int = 0


class Delimited(Protocol):
    """The text of one tool call, or of several adjacent ones."""

    def scan(self, text: str, start: int, final: bool) -> ScanResult:
        """Read on; `final` if no more text will come. Text that was not taken is passed again, with more."""
        ...

    def calls(self, raw: str) -> Calls:
        """Return the calls in the region's text; none if it is not a call after all."""
        ...


Read: TypeAlias = Callable[[str], Calls]


@lru_cache(maxsize=256)
def any_of(literals: Sequence[str], *more: str) -> re.Pattern[str]:
    """Return a pattern of any of the literals, or of other patterns."""
    return re.compile("|".join([*more, *(re.escape(each) for each in literals)]), re.DOTALL)


def held_from(text: str, start: int, literals: Sequence[str]) -> int:
    """Return the position from which the text may be the beginning of a literal; the text's length if nowhere."""
    longest = max(map(len, literals), default=1)
    for at in range(max(start, len(text) - longest + 1), len(text)):
        tail = text[at:]
        if any(literal.startswith(tail) for literal in literals):
            return at
    return len(text)


@dataclass(frozen=True, slots=True)
class Quotes:
    """Quotes, within which a closing marker is text. `escape` matches, as the group `escape`, a character that does not
    end the quotation. `broken` are literals that cannot occur in it: if one does, the quotes were never paired.
    """

    opening: str
    closing: str
    escape: str = ""
    broken: tuple[str, ...] = ()


JSON_STRINGS = Quotes('"', '"', escape=r"(?P<escape>\\.)", broken=("\n", "\r"))


class Enclosed:
    """A region up to its closing marker, or to a marker in `stops`, which belongs to the following text.

    A marker within quotes ends it only if the quotes turn out to be unpaired: then the first one did. That is detected
    at most once per text, as without `trusting` the first marker counts, so reading stays linear. `unfinished` reads a
    region cut off by the end of all text, if that is read differently.
    """

    def __init__(
        self,
        read: Read,
        closer: str,
        stops: Sequence[str] = (),
        quotes: Quotes | None = None,
        trusting: bool = True,
        unfinished: Read | None = None,
    ) -> None:
        self.calls = read
        self._unfinished = unfinished or read
        self._closer = closer
        self._quotes = quotes if trusting else None
        self._enders = (closer, *stops)
        self._quoted = False
        self._n_taken = 0
        self._passed: int | None = None

    def scan(self, text: str, start: int, final: bool) -> ScanResult:
        at = start
        pattern = self._pattern()
        while (match := pattern.search(text, at)) is not None:
            at = match.end()
            # An escaped character changes nothing, and a long string has many.
            if match.lastgroup == "escape":
                continue
            ended = self._meet(match, start)
            if ended is not None:
                return ended
            pattern = self._pattern()
        if final:
            return self._at_end(text)
        at = self._held(text, at)
        self._n_taken += at - start
        return ScanResult(at, at)

    def _pattern(self) -> re.Pattern[str]:
        quotes = self._quotes
        if quotes is None:
            return any_of(self._enders)
        if not self._quoted:
            return any_of((*self._enders, quotes.opening))
        return any_of(self._watched(quotes), *filter(None, (quotes.escape,)))

    def _watched(self, quotes: Quotes) -> tuple[str, ...]:
        """Return the literals to search for within quotes; of closing markers only the first matters."""
        passed = (self._closer,) if self._passed is None else ()
        return (quotes.closing, *passed, *quotes.broken)

    def _meet(self, match: re.Match[str], start: int) -> ScanResult | None:
        token, quotes = match.group(), self._quotes
        if quotes is None or not self._quoted:
            if token in self._enders:
                return ScanResult(match.start(), match.end() if token == self._closer else match.start(), token)
            self._quoted = True
        elif token == quotes.closing:
            self._quoted = False
        elif token == self._closer:
            self._passed = self._n_taken + match.start() - start
        elif token in quotes.broken:
            self._quotes = None
            if self._passed is not None:
                return self._back(match.end())
        return None

    def _back(self, at: int) -> ScanResult:
        return ScanResult(at, at, self._closer, self._passed, len(self._closer))

    def _at_end(self, text: str) -> ScanResult:
        if self._quoted and self._passed is not None and self._quotes is not None:
            return self._back(len(text))
        self.calls = self._unfinished
        return ScanResult(len(text), len(text), "")

    def _held(self, text: str, at: int) -> int:
        quotes = self._quotes
        if quotes is None:
            return held_from(text, at, self._enders)
        if not self._quoted:
            return held_from(text, at, (*self._enders, quotes.opening))
        if quotes.escape and text.endswith("\\") and at < len(text):
            return len(text) - 1
        return held_from(text, at, self._watched(quotes))


def enclosed(
    read: Read, closer: str, stops: Sequence[str], quotes: Quotes | None = None, unfinished: Read | None = None
) -> Callable[[bool], Delimited]:
    """Return a factory of an Enclosed region, given whether quotes can be trusted."""
    return lambda trusting: Enclosed(read, closer, stops, quotes, trusting, unfinished)


class Brackets:
    """Finds the bracket that closes the first one, with strings as JSON or as Python writes them."""

    _JSON = re.compile(r'["\[\]{}]')
    _PYTHON = re.compile(r'"""|\'\'\'|["\'\[\](){}]')

    def __init__(self, *, python: bool = False) -> None:
        self._outside = self._PYTHON if python else self._JSON
        self._python = python
        self._quote = ""
        self._depth = 0
        self.deepest = 0

    def scan(self, text: str, at: int, final: bool) -> tuple[int, bool]:
        """Return the position up to which it read, and whether that is the end: just after the closing bracket."""
        while True:
            pattern = any_of((self._quote,), r"\\.") if self._quote else self._outside
            match = pattern.search(text, at)
            if match is None:
                return (len(text) if final else self._held(text, at)), False
            token = match.group()
            if not final and self._may_be_longer(text, match):
                return match.start(), False
            at = match.end()
            if self._quote:
                self._quote = "" if token == self._quote else self._quote
            elif token[0] in "\"'":
                self._quote = token
            elif self._nest(token):
                return at, True

    def _nest(self, bracket: str) -> bool:
        self._depth += 1 if bracket in "[({" else -1
        self.deepest = max(self.deepest, self._depth)
        return self._depth <= 0

    def _may_be_longer(self, text: str, match: re.Match[str]) -> bool:
        """Return whether a quote at the end may be the first of three."""
        rest = text[match.start() : match.start() + 3]
        return self._python and not self._quote and len(rest) < 3 and set(rest) in ({'"'}, {"'"})

    def _held(self, text: str, at: int) -> int:
        if not self._quote:
            return len(text)
        if text.endswith("\\") and at < len(text):
            return len(text) - 1
        return held_from(text, at, (self._quote,))


class Bracketed:
    """A region that begins with a bracket and ends with its partner."""

    def __init__(self, read: Read, *, python: bool = False) -> None:
        self.calls = read
        self._brackets = Brackets(python=python)

    def scan(self, text: str, start: int, final: bool) -> ScanResult:
        at, ended = self._brackets.scan(text, start, final)
        return ScanResult(at, at, "" if ended or final else None)


class Headed(Bracketed):
    """A bracketed region, if it begins with the pattern `head`; `beginning` matches text that may become that.

    Both are bounded, so that only a few characters are held back.
    """

    def __init__(self, read: Read, head: str, beginning: str, *, python: bool = False) -> None:
        super().__init__(read, python=python)
        self._head = re.compile(head)
        self._beginning = re.compile(beginning)
        self._sure = False

    def scan(self, text: str, start: int, final: bool) -> ScanResult:
        if not self._sure and self._head.match(text, start) is None:
            if not final and self._beginning.fullmatch(text, start):
                return ScanResult(start, start)
            return ScanResult(start + 1, start + 1, "")
        self._sure = True
        return super().scan(text, start, final)
