"""What a file or a folder contains, as a digest: read once, and then known by its size, times and place.

An image of 5 GB is named by its content at every start of a sandbox, and must not be read at every one.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from farm.settings import settings
from workers.sandboxes.content import digest

_SETTLED_S = 2.0
"""What was changed within so short a time may change again and show the same times."""
_TRIES = 3

_known: dict[str, str] = {}


def fingerprint(path: Path, *, follow: bool = False) -> str:
    """The digest of a file's bytes; of a folder's names, modes, links and files. Blocks.

    With `follow`, links in a folder count as what they lead to. OSError if it cannot be read or does not stay the same.
    """
    for _ in range(_TRIES):
        stamp, newest = _look(path, follow)
        if stamp in _known:
            return _known[stamp]
        memo = folder() / stamp
        try:
            found = memo.read_text()
        except FileNotFoundError:
            found = _read(path, follow)
            if _look(path, follow)[0] != stamp:
                continue
            if abs(time.time() - newest) < _SETTLED_S:
                return found
            _write(memo, found)
        _known[stamp] = found
        return found
    raise OSError(f"{path} is being written: it was not the same from its beginning to its end")


def folder() -> Path:
    """Where digests are remembered, one small file each."""
    return settings().cache / "digests"


def _look(path: Path, follow: bool) -> tuple[str, float]:
    """A name for what is there as far as can be told without reading it, and when it was last changed."""
    seen, newest = [], 0.0
    for relative, _, found in _tree(str(path), follow):
        size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
        seen.append((relative, found.st_mode, size, found.st_mtime_ns, found.st_ino))
        newest = max(newest, found.st_mtime, found.st_ctime)
    return digest("look", str(path.absolute()), follow, seen), newest


def _tree(path: str, follow: bool) -> Iterator[tuple[str, str, os.stat_result]]:
    """A path, and in a fixed order all that is below it: name from there on, path, and what is known of it."""
    found = Path(path).stat()
    yield "", path, found
    if stat.S_ISDIR(found.st_mode):
        yield from _below(path, "", follow, frozenset({(found.st_dev, found.st_ino)}))


def _below(
    path: str, relative: str, follow: bool, above: frozenset[tuple[int, int]]
) -> Iterator[tuple[str, str, os.stat_result]]:
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = f"{relative}/{entry.name}"
            leads_on = follow and Path(entry.path).exists()
            found = entry.stat(follow_symlinks=leads_on)
            yield name, entry.path, found
            place = (found.st_dev, found.st_ino)
            if stat.S_ISDIR(found.st_mode) and place not in above:
                yield from _below(entry.path, name, follow, above | {place})


def _read(path: Path, follow: bool) -> str:
    """Times are left out: the same files, copied or checked out again, are the same content."""
    if path.is_file():
        return _digest_of(path)
    parts: list[tuple[str, int, str]] = []
    for relative, each, found in _tree(str(path), follow):
        content = ""
        if stat.S_ISLNK(found.st_mode):
            content = str(Path(each).readlink())
        elif stat.S_ISREG(found.st_mode):
            content = _digest_of(Path(each))
        parts.append((relative, found.st_mode, content))
    return digest("tree", parts)


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(memo: Path, found: str) -> None:
    """Whole or not at all, as others read it meanwhile."""
    memo.parent.mkdir(parents=True, exist_ok=True)
    new = memo.with_name(f"{memo.name}.{uuid4().hex}")
    new.write_text(found)
    new.replace(memo)
