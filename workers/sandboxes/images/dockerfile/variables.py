"""Words and variables of an instruction's arguments: quotes, escapes, `$NAME`, `${NAME:-default}`, `${NAME%pattern}`.

The rules are BuildKit's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_OPERATORS = (":-", ":+", ":?", "-", "+", "?")


@dataclass(frozen=True, slots=True)
class Expansion:
    """Replaces variables by their values, or by nothing if they are not set. Raises ValueError for invalid words."""

    values: Mapping[str, str]
    escape: str = "\\"

    def text(self, written: str) -> str:
        """Return a text without its quotes and escapes, and with variables replaced; spaces stay."""
        return _Reader(written, self).take(split=False)[0]

    def words(self, written: str) -> list[str]:
        """Return the words of a text, each treated like `text`."""
        return _Reader(written, self).take(split=True)

    def pairs(self, written: str) -> list[tuple[str, str]]:
        """Return `NAME=VALUE` words as pairs. ValueError for a word without `=`."""
        result = []
        for word in raw_words(written, self.escape):
            name, equals, value = word.partition("=")
            if not equals or not name:
                raise ValueError(f"{word!r} is not NAME=VALUE")
            result.append((self.text(name), self.text(value)))
        return result

    def inner(self, written: str, *, keep_escapes: bool = False) -> str:
        """Return a text with only its variables replaced, as in a heredoc."""
        return _Reader(written, self).take(split=False, quotes=False, keep_escapes=keep_escapes)[0]


def raw_words(written: str, escape: str = "\\") -> list[str]:
    """Return words with their quotes, escapes and variables as written. ValueError for an unclosed quote."""
    words, word, quote, at, depth = [], "", "", 0, 0
    while at < len(written):
        letter = written[at]
        if letter == escape and quote != "'" and at + 1 < len(written):
            word += written[at : at + 2]
            at += 2
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif written.startswith("${", at) or (depth and letter == "}"):
            depth += 1 if letter == "$" else -1
        elif letter.isspace() and not depth:
            words += [word] if word else []
            word, at = "", at + 1
            continue
        word += letter
        at += 1
    if quote:
        raise ValueError(f"the quote {quote} is not closed")
    return [*words, word] if word else words


class _Reader:
    def __init__(self, written: str, expansion: Expansion) -> None:
        self._written, self._at = written, 0
        self._expansion = expansion

    def take(self, *, split: bool, quotes: bool = True, keep_escapes: bool = False) -> list[str]:
        words: list[str] = []
        word, begun, quote = "", False, ""
        while self._at < len(self._written):
            letter = self._written[self._at]
            if letter == "$" and quote != "'":
                word, begun = word + self._variable(), True
            elif letter == self._expansion.escape and quote != "'" and self._at + 1 < len(self._written):
                kept = self._written[self._at : self._at + 2]
                escaped = self._escaped(quote if quotes else '"')
                word, begun = word + (kept if keep_escapes else escaped), True
            elif quotes and quote and letter == quote:
                quote, self._at = "", self._at + 1
            elif quotes and not quote and letter in "\"'":
                quote, begun, self._at = letter, True, self._at + 1
            elif split and not quote and letter.isspace():
                words += [word] if begun else []
                word, begun, self._at = "", False, self._at + 1
            else:
                word, begun, self._at = word + letter, True, self._at + 1
        if quote:
            raise ValueError(f"the quote {quote} is not closed")
        return [*words, word] if begun or not split else words

    def _escaped(self, quote: str) -> str:
        letter = self._written[self._at + 1]
        self._at += 2
        # within double quotes, it escapes only characters with a special meaning there
        return letter if not quote or letter in f'"${self._expansion.escape}' else self._expansion.escape + letter

    def _variable(self) -> str:
        self._at += 1
        if self._written[self._at : self._at + 1] == "{":
            return self._braced()
        match = _NAME.match(self._written, self._at)
        if match is None:
            return "$"
        self._at = match.end()
        return self._expansion.values.get(match[0], "")

    def _braced(self) -> str:
        end = self._closing()
        inside, self._at = self._written[self._at + 1 : end], end + 1
        match = _NAME.match(inside)
        if match is None:
            raise ValueError(f"${{{inside}}} does not name a variable")
        value, rest = self._expansion.values.get(match[0]), inside[match.end() :]
        if not rest:
            return value or ""
        if rest[0] in "#%/":
            return _edited(value or "", rest, Expansion(self._expansion.values, self._expansion.escape))
        operator = next((each for each in _OPERATORS if rest.startswith(each)), None)
        if operator is None:
            raise ValueError(f"${{{inside}}}: the supported forms with braces are :- :+ :? - + ? # ## % %% / and //")
        is_set = bool(value) if operator.startswith(":") else value is not None
        other = Expansion(self._expansion.values, self._expansion.escape).text(rest[len(operator) :])
        if operator.endswith("?") and not is_set:
            raise ValueError(f"{match[0]}: {other or 'not set'}")
        if operator.endswith("+"):
            return other if is_set else ""
        return (value or "") if is_set else other

    def _closing(self) -> int:
        depth, at = 1, self._at + 1
        while at < len(self._written):
            letter = self._written[at]
            opens = letter == "$" and self._written[at + 1 : at + 2] == "{"
            depth += 1 if opens else -1 if letter == "}" else 0
            if depth == 0:
                return at
            at += 2 if opens or letter == self._expansion.escape else 1
        raise ValueError("a brace { is not closed")


def _edited(value: str, rest: str, expansion: Expansion) -> str:
    """Return a value without a pattern's match at its start (`#`) or end (`%`), or with matches replaced (`/`).

    A doubled sign takes the longest match, or replaces all. ValueError for a missing replacement.
    """
    sign = rest[0]
    doubled = rest[1:2] == sign
    written = rest[2:] if doubled else rest[1:]
    if sign == "/":
        escape = re.escape(expansion.escape)
        slash = re.match(rf"(?:[^/{escape}]|{escape}.)*/", written, re.DOTALL)
        if slash is None:
            raise ValueError(f"{rest} has no replacement: the form is /PATTERN/TEXT")
        replaced = expansion.inner(written[: slash.end() - 1], keep_escapes=True)
        new = expansion.inner(written[slash.end() :], keep_escapes=True)
        # an empty pattern matches once, at the start
        return _glob(replaced, expansion.escape).sub(lambda _: new, value, count=0 if doubled and replaced else 1)
    pattern = _glob(expansion.inner(written, keep_escapes=True), expansion.escape)
    lengths = range(len(value) + 1)
    # from the shortest match to the longest, or in reverse order
    tries = reversed(lengths) if doubled else lengths
    if sign == "#":
        return next((value[n:] for n in tries if pattern.fullmatch(value[:n])), value)
    return next((value[: len(value) - n] for n in tries if pattern.fullmatch(value[len(value) - n :])), value)


def _glob(written: str, escape: str) -> re.Pattern[str]:
    """Return a shell pattern, in which `*` and `?` match any characters, as a regular expression."""
    result, at = "", 0
    while at < len(written):
        if written[at] == escape and at + 1 < len(written):
            at += 1
            result += re.escape(written[at])
        else:
            result += {"*": ".*", "?": "."}.get(written[at], re.escape(written[at]))
        at += 1
    return re.compile(result, re.DOTALL)
