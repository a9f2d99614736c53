"""Instructions of a Dockerfile, parsed like BuildKit's frontend (docs.docker.com/reference/dockerfile).

Comments inside continuations are dropped, `# escape=` is supported, and RUN, COPY and ADD take heredocs. The mounts of
RUN, `--mount=type=bind|cache|tmpfs|secret|ssh`, have BuildKit's options.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from farm.errors import ImageError
from workers.sandboxes.images.dockerfile.variables import Expansion

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
    result = []
    numbered = enumerate(lines, 1)
    for number, line in numbered:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        result.append(_instruction(file, number, _logical(line, numbered, escape), numbered))
    if not result:
        raise ImageError(f"{file} has no instructions")
    return result


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
