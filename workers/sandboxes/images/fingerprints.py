"""Digests of the contents of files and folders: computed once and then remembered by size, times and location.

The name of a 5 GB image depends on its content and is needed at every start of a sandbox, so it must not be read each
time.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from farm.settings import settings
from workers.sandboxes.images.content_store import digest, write

_SETTLED_S = 2.0
"""Seconds after a change in which another change may leave the same times. Such a digest is not remembered."""
_TRIES = 3

_known: dict[str, str] = {}


def fingerprint(path: Path, *, follow: bool = False) -> str:
    """Return the digest of a file's bytes, or of a folder's names, modes, links and files. Blocks.

    With `follow`, links in a folder count as their targets. Raises OSError if a file cannot be read or keeps changing.
    """
    for _ in range(_TRIES):
        stamp, newest = _look(path, follow)
        if stamp in _known:
            return _known[stamp]
        memo = folder() / stamp
        try:
            result = memo.read_text()
        except FileNotFoundError:
            result = _read(path, follow)
            if _look(path, follow)[0] != stamp:
                continue
            if abs(time.time() - newest) < _SETTLED_S:
                return result
            memo.parent.mkdir(parents=True, exist_ok=True)
            write(memo, result)
        _known[stamp] = result
        return result
    raise OSError(f"{path} is being written: it changed while it was read")


def folder() -> Path:
    """Return the folder of the remembered digests, one small file each."""
    return settings().cache / "digests"


def _look(path: Path, follow: bool) -> tuple[str, float]:
    """Return a digest of all metadata, without the contents, and the time of the last change, in s since 1970."""
    seen, newest = [], 0.0
    for relative, _, result in _tree(str(path), follow):
        size = 0 if stat.S_ISDIR(result.st_mode) else result.st_size
        seen.append((relative, result.st_mode, size, result.st_mtime_ns, result.st_ino))
        newest = max(newest, result.st_mtime, result.st_ctime)
    return digest("look", str(path.absolute()), follow, seen), newest


def _tree(path: str, follow: bool) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yield a path and everything below it in a fixed order: relative name, path and `stat` result."""
    result = Path(path).stat()
    yield "", path, result
    if stat.S_ISDIR(result.st_mode):
        yield from _below(path, "", follow, frozenset({(result.st_dev, result.st_ino)}))


def _below(
    path: str, relative: str, follow: bool, above: frozenset[tuple[int, int]]
) -> Iterator[tuple[str, str, os.stat_result]]:
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = f"{relative}/{entry.name}"
            leads_on = follow and Path(entry.path).exists()
            result = entry.stat(follow_symlinks=leads_on)
            yield name, entry.path, result
            place = (result.st_dev, result.st_ino)
            if stat.S_ISDIR(result.st_mode) and place not in above:
                yield from _below(entry.path, name, follow, above | {place})


def _read(path: Path, follow: bool) -> str:
    """Return the digest without times: copied or newly checked out files are the same content."""
    if path.is_file():
        return _digest_of(path)
    parts: list[tuple[str, int, str]] = []
    for relative, each, result in _tree(str(path), follow):
        content = ""
        if stat.S_ISLNK(result.st_mode):
            content = str(Path(each).readlink())
        elif stat.S_ISREG(result.st_mode):
            content = _digest_of(Path(each))
        parts.append((relative, result.st_mode, content))
    return digest("tree", parts)


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
