"""The build context: the folder whose files a Dockerfile may copy, without those that `.dockerignore` excludes.

Their modes may be changed by `COPY --chmod`: in digits, or in letters as for `chmod` (`u=rwX,go=rX`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from workers.sandboxes.images.content_store import digest, fingerprint

Patterns: TypeAlias = tuple[tuple[re.Pattern[str], bool], ...]
"""Patterns of excluded files, each with whether it is an exception that keeps its matches."""
MAX_FILES = 200_000
_LARGE = 1 << 20
"""Minimum size of files whose digest is remembered on disk, in bytes."""

FileMode: TypeAlias = int | str
"""Digits as a number, letters as written."""

_CLAUSE = re.compile(r"([ugoa]*)((?:[-+=](?:[rwxXst]*|[ugo]))+)")
_CHANGE = re.compile(r"([-+=])([rwxXst]+|[ugo]|)")
_SHIFTS = {"u": 6, "g": 3, "o": 0}
_BITS = {"r": 4, "w": 2, "x": 1}


@dataclass(frozen=True, slots=True)
class ContextFile:
    """A file, folder or link of a context. `relative` is its path below the copied one, empty for that itself."""

    relative: str
    path: Path
    mode: int


@dataclass(frozen=True)
class BuildContext:
    """A folder and the patterns of excluded files. Its methods raise ValueError or OSError."""

    folder: Path
    patterns: Patterns = ()

    @classmethod
    def of(cls, folder: Path, dockerfile: Path) -> BuildContext:
        """Return the context of a folder, with the patterns of `NAME.dockerignore` next to the file or the folder's."""
        for path in (dockerfile.with_name(f"{dockerfile.name}.dockerignore"), folder / ".dockerignore"):
            if path.is_file():
                return cls(folder, tuple(ignore_patterns(path.read_text(encoding="utf-8-sig"))))
        return cls(folder)

    @cached_property
    def _root(self) -> Path:
        return self.folder.resolve()

    def ignores(self, relative: str) -> bool:
        """Return whether a file is excluded."""
        return ignores(self.patterns, relative)

    def named(self, pattern: str) -> list[str]:
        """Return the names in the context that match a source of COPY, sorted; empty if there are none."""
        clean = os.path.normpath("/" + pattern).lstrip("/")
        if clean in ("", "."):
            return [""]
        names = [""]
        for part in clean.split("/"):
            names = [name for parent in names for name in self._children(parent, part)]
        return [name for name in names if not self.ignores(name) or self._has_kept(name)]

    def _children(self, parent: str, part: str) -> list[str]:
        folder = self.folder / parent
        prefix = f"{parent}/" if parent else ""
        if not is_pattern(part):
            return [prefix + part] if os.path.lexists(folder / part) else []
        match = glob_pattern(part)
        names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
        return [prefix + name for name in names if match.fullmatch(name)]

    def _has_kept(self, name: str) -> bool:
        exceptions = any(keeps for _, keeps in self.patterns)
        return exceptions and (self.folder / name).is_dir() and any(True for _ in self._below(name))

    def tree(self, name: str) -> list[ContextFile]:
        """Return a file, or a folder with its contents, in a fixed order. ValueError if it leads out of the context."""
        path = (self.folder / name).resolve() if name else self._root
        if not path.is_relative_to(self._root):
            raise ValueError(f"{name} leads out of the context {self.folder}")
        files = [ContextFile("", path, path.stat().st_mode)]
        if path.is_dir():
            files += self._below(name)
        if len(files) > MAX_FILES:
            raise ValueError(f"{name or '.'} has more than {MAX_FILES:,} files")
        return files

    def _below(self, name: str) -> Iterator[ContextFile]:
        exceptions = any(keeps for _, keeps in self.patterns)
        top = (self.folder / name).resolve()
        for parent, folders, files in os.walk(top):
            inside = os.path.relpath(parent, top)
            for each in sorted((*folders, *files)):
                relative = each if inside == "." else f"{inside}/{each}"
                path = Path(parent, each)
                left_out = self.ignores(f"{name}/{relative}" if name else relative)
                mode = path.lstat().st_mode
                if left_out and not (exceptions and stat.S_ISDIR(mode)):
                    folders[:] = [folder for folder in folders if folder != each]
                elif stat.S_ISREG(mode) or stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and not left_out):
                    yield ContextFile(relative, path, mode)
            folders.sort()


def ignore_patterns(text: str) -> Iterator[tuple[re.Pattern[str], bool]]:
    """Yield the patterns of a `.dockerignore`, each with whether it is an exception that keeps its matches."""
    for line in text.splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        keeps = pattern.startswith("!")
        clean = os.path.normpath("/" + pattern.removeprefix("!").strip()).lstrip("/")
        if clean:
            yield glob_pattern(clean), keeps


def ignores(patterns: Patterns, relative: str) -> bool:
    """Return whether a file is excluded: the last pattern that matches it or one of its parents decides."""
    left_out = False
    parts = relative.split("/")
    above = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
    for pattern, keeps in patterns:
        if any(pattern.fullmatch(each) for each in above):
            left_out = not keeps
    return left_out


def is_pattern(text: str) -> bool:
    """Return whether a source of COPY may match several names, or none."""
    return re.search(r"[*?\[\\]", text) is not None


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """Return a pattern of Go's `filepath.Match`, with `**` for any number of folders, as a regular expression."""
    expression, at = "", 0
    while at < len(pattern):
        letter = pattern[at]
        at += 1
        if letter == "*" and pattern[at : at + 1] == "*":
            at += 1
            if pattern[at : at + 1] == "/":
                expression, at = expression + "(?:.*/)?", at + 1
            else:
                expression += ".*"
        elif letter == "*":
            expression += "[^/]*"
        elif letter == "?":
            expression += "[^/]"
        elif letter == "[" and (end := pattern.find("]", at + 1)) > 0:
            inside = pattern[at:end].replace("\\", "\\\\").replace("[", "\\[")
            expression, at = f"{expression}[{inside}]", end + 1
        elif letter == "\\" and at < len(pattern):
            expression, at = expression + re.escape(pattern[at]), at + 1
        else:
            expression += re.escape(letter)
    return re.compile(expression, re.DOTALL)


def digest_of(files: Sequence[ContextFile], digests: Path) -> str:
    """Return the digest of names, modes and contents, without times and owners. Raises OSError."""
    kinds = [stat.S_IFLNK if stat.S_ISLNK(file.mode) else file.mode for file in files]
    return digest(
        "context", [(file.relative, kind, _content(file, digests)) for file, kind in zip(files, kinds, strict=True)]
    )


def _content(file: ContextFile, digests: Path) -> str:
    if stat.S_ISLNK(file.mode):
        return str(file.path.readlink())
    if not stat.S_ISREG(file.mode):
        return ""
    if file.path.stat().st_size >= _LARGE:
        return fingerprint(file.path, digests)
    return hashlib.sha256(file.path.read_bytes()).hexdigest()


def copy_files(files: Sequence[ContextFile], target: Path, mode: FileMode | None = None) -> None:
    """Copy the files of `BuildContext.tree` to a new path; `mode` applies to all files. Raises OSError. Blocks."""
    # modes last, because a mode may prevent the creation of files in a folder
    folders: list[tuple[Path, int]] = []
    for file in files:
        path = target / file.relative if file.relative else target
        path.parent.mkdir(parents=True, exist_ok=True)
        if stat.S_ISDIR(file.mode):
            path.mkdir(exist_ok=True)
            folders.append((path, applied(mode, stat.S_IMODE(file.mode), is_folder=True)))
            continue
        elif stat.S_ISLNK(file.mode):
            path.symlink_to(file.path.readlink())
            continue
        else:
            shutil.copyfile(file.path, path)
            times = file.path.stat()
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        path.chmod(applied(mode, stat.S_IMODE(file.mode), is_folder=False))
    for path, mode_of in reversed(folders):
        path.chmod(mode_of)


def file_mode(written: str) -> FileMode:
    """Return the parsed mode. Raises ValueError if it is invalid."""
    if re.fullmatch(r"[0-7]{1,4}", written):
        return int(written, 8)
    if written[:1].isdigit() or not all(_CLAUSE.fullmatch(clause) for clause in written.split(",")):
        raise ValueError(f"--chmod={written}: it is a mode in digits, such as 755, or in letters, such as u=rwX,go=rX")
    return written


def applied(mode: FileMode | None, own: int, *, is_folder: bool) -> int:
    """Return the new permissions of a file with the permissions `own`; these stay if `mode` is None."""
    if not isinstance(mode, str):
        return own if mode is None else mode
    permissions = own
    for clause in mode.split(","):
        match = _CLAUSE.fullmatch(clause)
        assert match
        who = "ugo" if "a" in match[1] or not match[1] else match[1]
        for sign, letters in _CHANGE.findall(match[2]):
            permissions = _changed(permissions, who, sign, letters, is_folder)
    return permissions


def _changed(mode: int, who: str, sign: str, letters: str, is_folder: bool) -> int:
    wanted = cleared = 0
    for each in who:
        bits = sum({_BITS.get(letter, 0) for letter in letters})
        if letters in _SHIFTS and letters:
            bits = mode >> _SHIFTS[letters] & 7
        if "X" in letters and (is_folder or mode & 0o111):
            bits |= 1
        wanted |= bits << _SHIFTS[each]
        cleared |= 7 << _SHIFTS[each]
        if each in "ug":
            special = 0o4000 if each == "u" else 0o2000
            wanted |= special if "s" in letters else 0
            cleared |= special
    if "t" in letters:
        wanted |= 0o1000
    if sign == "-":
        return mode & ~wanted
    return (mode & ~cleared if sign == "=" else mode) | wanted
