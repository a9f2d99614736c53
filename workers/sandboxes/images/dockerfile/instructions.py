"""Instructions of a Dockerfile, parsed like BuildKit's frontend (docs.docker.com/reference/dockerfile).

Comments inside continuations are dropped, `# escape=` is supported, and RUN, COPY and ADD take heredocs. The mounts of
RUN, `--mount=type=bind|cache|tmpfs|secret|ssh`, have BuildKit's options. Words and variables of arguments have its
quotes, escapes, `$NAME`, `${NAME:-default}` and `${NAME%pattern}`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from farm.errors import ImageError

KNOWN = {
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "MAINTAINER"),
    *("ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}
_WITH_FLAGS = {"FROM", "COPY", "ADD", "RUN", "HEALTHCHECK"}
_WITH_HEREDOCS = {"RUN", "COPY", "ADD"}
_IN_JSON = {"RUN", "COPY", "ADD", "CMD", "ENTRYPOINT", "SHELL", "VOLUME"}
_DIRECTIVE = re.compile(r"#\s*([A-Za-z][\w-]*)\s*=\s*(\S+)\s*")
_FLAG = re.compile(r"--([a-z-]+)(?:=((?:\"[^\"]*\"|'[^']*'|\S)*))?(?:\s+|$)")
_HEREDOC = re.compile(r"(?:^|(?<=\s))\d*<<(-?)([\"']?)([A-Za-z_][\w.]*)\2(?=[\s;&|)>]|$)")

_KINDS = ("bind", "cache", "tmpfs", "secret", "ssh")
_NAMES = {"src": "source", "dst": "target", "destination": "target", "ro": "readonly", "rw": "readwrite"}
_FLAGS = {"readonly", "readwrite", "required"}
_KNOWN = {
    *("type", "from", "source", "target", "readonly", "readwrite", "id", "sharing", "required", "size", "mode"),
    *("uid", "gid", "env"),
}

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_OPERATORS = (":-", ":+", ":?", "-", "+", "?")


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A text that follows its instruction; `expands` tells whether variables in it are replaced."""

    name: str
    text: str
    expands: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: `text` follows its name and flags, `words` is its JSON form if it has that."""

    file: str
    line: int
    name: str
    text: str
    flags: tuple[tuple[str, str], ...] = ()
    words: tuple[str, ...] | None = None
    heredocs: tuple[Heredoc, ...] = ()

    def flag(self, name: str) -> str | None:
        """Return the value of a flag, the last if it is repeated; None without it."""
        return dict(self.flags).get(name)

    def switch(self, name: str, default: bool = False) -> bool:
        """Return the value of a boolean flag: `--link`, `--link=false`. Raises ValueError for another value."""
        value = self.flag(name)
        if value is None:
            return default
        if value.lower() not in ("", "true", "1", "t", "false", "0", "f"):
            raise ValueError(f"--{name}={value}: it must be true or false")
        return value.lower() in ("", "true", "1", "t")

    def refused(self, reason: str) -> ImageError:
        """Return an error that names this instruction, its file and its line."""
        first = self.text.partition("\n")[0]
        shown = f"{self.name} {first if len(first) <= 80 else first[:79] + '…'}".rstrip()
        return ImageError(f"{self.file}:{self.line}: {shown}: {reason}")


def read(path: Path) -> list[Instruction]:
    """Return the instructions of a file. ImageError, with the line, for an invalid one."""
    try:
        return parse(path.read_text(encoding="utf-8-sig"), str(path))
    except FileNotFoundError:
        raise ImageError(f"there is no {path} on this node") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ImageError(f"{path} cannot be read: {error}") from error


def parse(text: str, file: str = "Dockerfile") -> list[Instruction]:
    """Return the instructions of a text. ImageError, with the line, for an invalid one."""
    lines = text.replace("\r\n", "\n").split("\n")
    escape = _escape(lines, file)
    instructions = []
    numbered = enumerate(lines, 1)
    for number, line in numbered:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        instructions.append(_instruction(file, number, _logical(line, numbered, escape), numbered))
    if not instructions:
        raise ImageError(f"{file} has no instructions")
    return instructions


def escape_of(text: str) -> str:
    """Return the escape character: a backslash, or the one of a directive at the top."""
    return _escape(text.split("\n"), "Dockerfile")


def _escape(lines: list[str], file: str) -> str:
    for number, line in enumerate(lines, 1):
        match = _DIRECTIVE.fullmatch(line.strip())
        if match is None:
            break
        if match[1].lower() == "escape":
            if match[2] not in ("\\", "`"):
                raise ImageError(f"{file}:{number}: escape={match[2]}: it must be \\ or `")
            return match[2]
    return "\\"


def _logical(line: str, rest: Iterator[tuple[int, str]], escape: str) -> str:
    """Return a line joined with its continuations, without comments and empty lines among them."""
    parts = []
    while line.rstrip().endswith(escape):
        parts.append(line.rstrip()[: -len(escape)])
        for _, following in rest:
            if following.strip() and not following.lstrip().startswith("#"):
                line = following
                break
        else:
            line = ""
    return "".join([*parts, line]).strip()


def _instruction(file: str, number: int, logical: str, rest: Iterator[tuple[int, str]]) -> Instruction:
    name, _, text = logical.partition(" ") if " " in logical else logical.partition("\t")
    name, text = name.upper(), text.strip()
    if name not in KNOWN:
        raise ImageError(f"{file}:{number}: {name}: there is no such instruction")
    flags = []
    while name in _WITH_FLAGS and (match := _FLAG.match(text)):
        flags.append((match[1], (match[2] or "").strip("\"'")))
        text = text[match.end() :]
    bare = Instruction(file, number, name, text, tuple(flags))
    heredocs = tuple(_heredocs(bare, rest)) if name in _WITH_HEREDOCS else ()
    if not text and name != "MAINTAINER":
        raise bare.refused("it needs arguments")
    return Instruction(file, number, name, text, tuple(flags), _words(name, text), heredocs)


def _words(name: str, text: str) -> tuple[str, ...] | None:
    """Return the words of the JSON form; None if it is not exactly that form, so that it is a shell's."""
    if name not in _IN_JSON or not text.startswith("["):
        return None
    try:
        words = json.loads(text)
    except ValueError:
        return None
    return tuple(words) if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def _heredocs(instruction: Instruction, rest: Iterator[tuple[int, str]]) -> Iterator[Heredoc]:
    for dash, quote, name in _HEREDOC.findall(instruction.text):
        body = []
        for _, line in rest:
            kept = line.lstrip("\t") if dash else line
            if kept == name:
                break
            body.append(kept + "\n")
        else:
            raise instruction.refused(f"its heredoc does not end: no line is {name}")
        yield Heredoc(name, "".join(body), not quote)


def without_heredocs(text: str) -> str:
    """Return the arguments of COPY or ADD with the markers of heredocs as plain words."""
    return _HEREDOC.sub(lambda match: f"<<{match[3]}", text)


def is_only_heredoc(text: str) -> bool:
    """Return whether a RUN consists only of a heredoc, which is then the script itself."""
    return bool(re.fullmatch(_HEREDOC.pattern, text.strip()))


@dataclass(frozen=True, slots=True)
class MountOptions:
    """The options of one mount: `origin` is the stage or image of a bind, empty for the context."""

    kind: str
    origin: str
    source: str
    target: str
    required: bool


def mounts_of(instruction: Instruction, expansion: Expansion) -> list[MountOptions]:
    """Return the mounts of a RUN. Raises ValueError for an invalid one."""
    return [_options(value, expansion) for name, value in instruction.flags if name == "mount"]


def origins_of(instruction: Instruction) -> list[str]:
    """Return the stages and images of a RUN's mounts as written; they must not contain variables."""
    fields = [_fields(value) for name, value in instruction.flags if name == "mount"]
    return [each["from"] for each in fields if each.get("from")]


def _fields(written: str) -> Mapping[str, str]:
    fields = {}
    for field in next(csv.reader([written]), []):
        name, equals, value = field.partition("=")
        name = _NAMES.get(name.lower(), name.lower())
        fields[name] = value if equals else "true" if name in _FLAGS else ""
    return fields


def _options(written: str, expansion: Expansion) -> MountOptions:
    fields = _fields(written)
    for name, value in fields.items():
        if name not in _KNOWN or not value:
            raise ValueError(f"--mount={written}: {name} is not an option of a mount, or has no value")
    values = {name: value if name == "from" else expansion.text(value) for name, value in fields.items()}
    kind = values.get("type", "bind").lower()
    if kind not in _KINDS:
        raise ValueError(f"--mount=type={kind} is not supported; there are {', '.join(_KINDS)}")
    target = values.get("target", "")
    if not target and kind in ("bind", "cache", "tmpfs"):
        raise ValueError(f"--mount={written}: it has no target")
    required = values.get("required", "").lower() in ("true", "1", "t")
    return MountOptions(kind, values.get("from", ""), values.get("source", ""), target, required)


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
        pairs = []
        for word in raw_words(written, self.escape):
            name, equals, value = word.partition("=")
            if not equals or not name:
                raise ValueError(f"{word!r} is not NAME=VALUE")
            pairs.append((self.text(name), self.text(value)))
        return pairs

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
    expression, at = "", 0
    while at < len(written):
        if written[at] == escape and at + 1 < len(written):
            at += 1
            expression += re.escape(written[at])
        else:
            expression += {"*": ".*", "?": "."}.get(written[at], re.escape(written[at]))
        at += 1
    return re.compile(expression, re.DOTALL)
