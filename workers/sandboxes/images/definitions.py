"""Definition files of images: rendered from templates, and read as far as needed to know all that goes into one.

The builder takes paths as they are and from where it runs; here they are the definition's own, relative to its folder,
and what they name is part of what the image is known by. What would run on the node itself is refused.
"""

from __future__ import annotations

import glob
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from jinja2 import FileSystemLoader, StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from farm.errors import ImageError

TEMPLATE = ".j2"
ON_THE_NODE = ("setup", "pre")
"""Sections that would run outside of the image."""
OF_FILES = ("localimage", "docker-archive", "oci-archive", "oci")
"""Ways to begin an image from a file or folder of the node."""
OF_REGISTRIES = ("docker", "oras", "library", "shub")

# as the builder splits a definition, and a line of %files
_STAGE = re.compile(r"bootstrap:", re.IGNORECASE)
_WORD = re.compile(r'"[^"]*"|[^\s"]+')
_PLAIN = re.compile(r"[\w./@%+=:,*?\[\]~ -]+")

LendImage = Callable[[Path, str, bool], Path]
"""Makes a path readable for the builder under a plain name; the last argument: whether it must belong to its user."""


@dataclass(frozen=True, slots=True)
class CopiedFiles:
    """One line of %files: pairs of what it copies and where to; `contents`: of a folder, only what is in it."""

    line: int
    pairs: tuple[tuple[Path, str], ...]
    contents: bool


@dataclass(frozen=True, slots=True)
class StageSource:
    """The `From` of a stage that begins with a file or folder of the node; `tag` is what follows the path."""

    line: int
    source: Path
    tag: str = ""


@dataclass(slots=True)
class Definition:
    """A definition, rendered, and what of the node goes into it."""

    text: str
    begun: list[StageSource] = field(default_factory=list)
    copied: list[CopiedFiles] = field(default_factory=list)
    from_registry: bool = False

    def sources(self) -> list[Path]:
        """Return all that it is made of beside its text."""
        return [*(stage.source for stage in self.begun), *(path for copy in self.copied for path, _ in copy.pairs)]

    def lent(self, lend: LendImage) -> str:
        """Return its text, with the paths by which the builder can read what it is made of."""
        lines = self.text.split("\n")
        for number, stage in enumerate(self.begun):
            path = lend(stage.source, f"base-{number}{stage.source.suffix}", stage.source.is_dir())
            lines[stage.line] = f"From: {path}{stage.tag}"
        for number, copy in enumerate(self.copied):
            lines[copy.line] = "\n".join(_copies(copy, number, lend))
        return "\n".join(lines) + "\n"


def _copies(copy: CopiedFiles, number: int, lend: LendImage) -> list[str]:
    """Return lines with the lent path of each source; its name is kept, as the target may be a folder."""
    words = []
    for index, (source, target) in enumerate(copy.pairs):
        lent = lend(source, f"files-{number}-{index}/{source.name}", False)
        words.append(f'"{lent}{"/." if copy.contents else ""}" "{target}"')
    return words


def read(path: Path, values: Mapping[str, str]) -> Definition:
    """Render and read a definition. ImageError if it, or something that it names, is not there or is not right."""
    if path.suffix == TEMPLATE:
        return parse(_rendered(path, values), path)
    try:
        return parse(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ImageError(f"image {path} cannot be read: {error}") from error


def _rendered(path: Path, values: Mapping[str, str]) -> str:
    """Render by a Jinja that reads only the template's folder. ImageError, also for a value that could add sections."""
    wrong = [name for name, value in values.items() if not value.isprintable()]
    if wrong:
        raise ImageError(f"image {path}: the value of {wrong[0]} has line ends or control characters, or others unseen")
    try:
        return _jinja(path.parent).get_template(path.name).render(values)
    except (TemplateError, OSError, UnicodeDecodeError, TypeError, ValueError, ArithmeticError) as error:
        line = getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        raise ImageError(
            f"image {path} cannot be rendered{where}: {error}; its image_values are {dict(values)}"
        ) from error


@lru_cache(maxsize=32)
def _jinja(folder: Path) -> SandboxedEnvironment:
    """Return the Jinja environment of a folder; it reloads a template that has changed."""
    # what it makes is no HTML
    return SandboxedEnvironment(
        loader=FileSystemLoader(folder), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )


def parse(text: str, path: Path) -> Definition:
    """Find what of the node goes into a definition. ImageError if it is missing, or something would run on the node."""
    definition = Definition(text)
    section, arguments = "", ""
    header: dict[str, tuple[int, str]] = {}
    headers = [header]
    for number, line in enumerate(text.split("\n")):
        words = line.split()
        if _STAGE.match(line):
            section, header = "", {}
            headers.append(header)
        if words and words[0].startswith("%"):
            section, arguments = words[0].lstrip("%").lower(), line.split("#")[0].strip().partition(" ")[2]
            if section in ON_THE_NODE:
                raise ImageError(f"image {path}: %{section} would run on the node itself; do it in %post or %files")
        elif not words or words[0].startswith("#"):
            continue
        elif not section:
            key, _, value = line.split("#")[0].partition(":")
            header[key.strip().lower()] = (number, value.strip())
        elif section == "files" and not arguments:
            definition.copied.append(_copied(number, line, path))
    for each in headers:
        _begin(definition, each, path)
    return definition


def _begin(found: Definition, header: Mapping[str, tuple[int, str]], path: Path) -> None:
    """Note what a stage begins with."""
    kind = header.get("bootstrap", (0, ""))[1].lower()
    found.from_registry |= kind in OF_REGISTRIES
    if kind in OF_FILES and "from" in header:
        number, value = header["from"]
        source, tag = split_tag(path.parent / _plain(value, path))
        if not source.exists():
            raise ImageError(f"image {path} begins with {source}, which is not there")
        found.begun.append(StageSource(number, source.absolute(), tag))


def split_tag(path: Path) -> tuple[Path, str]:
    """Return an archive's own path, and the `:TAG` that may follow it."""
    if not path.exists() and ":" in path.name:
        name, _, tag = path.name.partition(":")
        return path.with_name(name), f":{tag}"
    return path, ""


def _copied(number: int, line: str, path: Path) -> CopiedFiles:
    words = [_plain(word.strip('"'), path) for word in _WORD.findall(line.strip())]
    written, target = words[0], words[1] if len(words) > 1 else ""
    if written.startswith("~"):
        raise ImageError(f"image {path}: {written} depends on who builds it: name an absolute path, or a relative one")
    result = sorted(glob.glob(written, root_dir=path.parent))  # noqa: PTH207 - only this one takes a folder to start in
    if not result:
        raise ImageError(f"image {path} copies {written}, which is not in {path.parent}")
    for name in result:
        _plain(name, path)
    pairs = tuple(((path.parent / name).absolute(), target or name) for name in result)
    return CopiedFiles(number, pairs, contents=written == "." or written.endswith("/."))


def _plain(written: str, path: Path) -> str:
    """Return a path as written. ImageError if it could mean something else to a shell or to the builder."""
    if not _PLAIN.fullmatch(written):
        mend = f"use a {TEMPLATE} template for values" if "{" in written else "name it plainly"
        raise ImageError(f"image {path}: {shlex.quote(written)} is no plain path: {mend}")
    return written
