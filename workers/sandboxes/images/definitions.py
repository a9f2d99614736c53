"""Definition files of images: rendered from templates, and parsed as far as needed to find all inputs of the image.

The builder resolves paths relative to its working directory. Here they are relative to the definition's folder, and the
files that they name are part of the image's key. Sections that would run on the node itself are refused.
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
"""Bootstrap types that start an image from a file or folder of the node."""
OF_REGISTRIES = ("docker", "oras", "library", "shub")

# the builder's own rules to split a definition and a line of %files
_STAGE = re.compile(r"bootstrap:", re.IGNORECASE)
_WORD = re.compile(r'"[^"]*"|[^\s"]+')
_PLAIN = re.compile(r"[\w./@%+=:,*?\[\]~ -]+")

LendImage = Callable[[Path, str, bool], Path]
"""Makes a path readable for the builder under a plain name. Last argument: must it belong to the builder's user."""


@dataclass(frozen=True, slots=True)
class CopiedFiles:
    """One line of %files: pairs of source and target; `contents`: of a folder, copy only its contents."""

    line: int
    pairs: tuple[tuple[Path, str], ...]
    contents: bool


@dataclass(frozen=True, slots=True)
class StageSource:
    """The `From` of a stage that starts from a file or folder of the node; `tag` is the text after the path."""

    line: int
    source: Path
    tag: str = ""


@dataclass(slots=True)
class Definition:
    """A rendered definition and its inputs from the node."""

    text: str
    begun: list[StageSource] = field(default_factory=list)
    copied: list[CopiedFiles] = field(default_factory=list)
    from_registry: bool = False

    def sources(self) -> list[Path]:
        """Return all files and folders that are inputs of the image, without the definition itself."""
        return [*(stage.source for stage in self.begun), *(path for copy in self.copied for path, _ in copy.pairs)]

    def lent(self, lend: LendImage) -> str:
        """Return the definition's text with paths that the builder can read."""
        lines = self.text.split("\n")
        for number, stage in enumerate(self.begun):
            path = lend(stage.source, f"base-{number}{stage.source.suffix}", stage.source.is_dir())
            lines[stage.line] = f"From: {path}{stage.tag}"
        for number, copy in enumerate(self.copied):
            lines[copy.line] = "\n".join(_copies(copy, number, lend))
        return "\n".join(lines) + "\n"


def _copies(copy: CopiedFiles, number: int, lend: LendImage) -> list[str]:
    """Return lines with the lent path of each source. Names are kept, because the target may be a folder."""
    words = []
    for index, (source, target) in enumerate(copy.pairs):
        lent = lend(source, f"files-{number}-{index}/{source.name}", False)
        words.append(f'"{lent}{"/." if copy.contents else ""}" "{target}"')
    return words


def read(path: Path, values: Mapping[str, str]) -> Definition:
    """Render and parse a definition. Raises ImageError if it or one of its inputs is missing or invalid."""
    if path.suffix == TEMPLATE:
        return parse(_rendered(path, values), path)
    try:
        return parse(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ImageError(f"image {path} cannot be read: {error}") from error


def _rendered(path: Path, values: Mapping[str, str]) -> str:
    """Render with a Jinja limited to the template's folder. ImageError, also for a value that could add sections."""
    wrong = [name for name, value in values.items() if not value.isprintable()]
    if wrong:
        raise ImageError(f"image {path}: the value of {wrong[0]} contains line ends, control or invisible characters")
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
    """Return the Jinja environment of a folder; it reloads changed templates."""
    # the result is not HTML
    return SandboxedEnvironment(
        loader=FileSystemLoader(folder), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )


def parse(text: str, path: Path) -> Definition:
    """Find the inputs of a definition on the node. ImageError if one is missing, or a section would run on the node."""
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


def _begin(definition: Definition, header: Mapping[str, tuple[int, str]], path: Path) -> None:
    kind = header.get("bootstrap", (0, ""))[1].lower()
    definition.from_registry |= kind in OF_REGISTRIES
    if kind in OF_FILES and "from" in header:
        number, value = header["from"]
        source, tag = split_tag(path.parent / _plain(value, path))
        if not source.exists():
            raise ImageError(f"image {path} begins with {source}, which does not exist")
        definition.begun.append(StageSource(number, source.absolute(), tag))


def split_tag(path: Path) -> tuple[Path, str]:
    """Return an archive's path without its tag, and the `:TAG`, which may be empty."""
    if not path.exists() and ":" in path.name:
        name, _, tag = path.name.partition(":")
        return path.with_name(name), f":{tag}"
    return path, ""


def _copied(number: int, line: str, path: Path) -> CopiedFiles:
    words = [_plain(word.strip('"'), path) for word in _WORD.findall(line.strip())]
    written, target = words[0], words[1] if len(words) > 1 else ""
    if written.startswith("~"):
        raise ImageError(f"image {path}: {written} depends on who builds it: name an absolute path, or a relative one")
    names = sorted(glob.glob(written, root_dir=path.parent))  # noqa: PTH207 - only this one takes a folder to start in
    if not names:
        raise ImageError(f"image {path} copies {written}, which is not in {path.parent}")
    for name in names:
        _plain(name, path)
    pairs = tuple(((path.parent / name).absolute(), target or name) for name in names)
    return CopiedFiles(number, pairs, contents=written == "." or written.endswith("/."))


def _plain(written: str, path: Path) -> str:
    """Return the path. Raises ImageError if a shell or the builder could interpret it differently."""
    if not _PLAIN.fullmatch(written):
        remedy = f"use a {TEMPLATE} template for values" if "{" in written else "name it plainly"
        raise ImageError(f"image {path}: {shlex.quote(written)} is not a plain path: {remedy}")
    return written
