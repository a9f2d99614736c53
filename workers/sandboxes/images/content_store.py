"""Folders named by their content and created once: the caches of images, layers and environments.

If several processes (or several nodes with a shared home) need the same folder, one creates it and the others wait.
Neither time counts towards the time limit of a stage (`workers/stage_clock.py`), up to the time of two attempts: one
that is waited for, and a second one if it failed.

The name of a 5 GB image depends on its content and is needed at every start of a sandbox, so it must not be read each
time: digests of files and folders are computed once and then remembered by size, times and location.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from farm.errors import SandboxError
from workers.sandboxes.images.shared_lock import exclusive
from workers.sandboxes.remove_tree import remove
from workers.stage_clock import off_clock

MAKE_S = 900.0
"""Default time limit for the creation of a folder."""
PARTS = ("archives", "environments", "programs")
"""The caches of data that sandboxes use beside their images, each with one folder for each content."""
_COMPLETE = ".complete"
_NOTE_S = 30.0
_noted: dict[Path, float] = {}
_OLD_S = 600.0
"""Seconds after its last change at which a folder that was created without the lock counts as abandoned."""

_SETTLED_S = 2.0
"""Seconds after a change in which another change may leave the same times. Such a digest is not remembered."""
_TRIES = 3

_known: dict[str, str] = {}


def digest(*parts: object) -> str:
    """Return a name for content that is identified by these JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def lock_of(folder: Path) -> Path:
    """Return the lock file of a folder that is created once."""
    return folder.with_name(folder.name + ".lock")


def made_once(
    folder: Path,
    make: Callable[[Path], None],
    good: Callable[[Path], bool] = Path.is_dir,
    *,
    private: bool = False,
    within_s: float = MAKE_S,
) -> Path:
    """Return the folder if it is `good`; otherwise `make(temporary)` fills one, which is renamed to it. Blocks.

    Everyone may read it, whatever the umask, because sandboxes may run as another user; `private` keeps the modes.
    `within_s` is the creation's own time limit.
    """
    if good(folder):
        return folder
    with off_clock(2 * within_s), exclusive(lock_of(folder)) as held:
        if not good(folder):
            remove_unfinished(folder, held)
            kind = ".new." if held else ".alone."
            temporary = Path(tempfile.mkdtemp(prefix=folder.name + kind, dir=folder.parent))
            try:
                temporary.chmod(0o755)
                make(temporary)
                if not private:
                    open_to_all(temporary)
                _put(temporary, folder, good)
            finally:
                remove(temporary)
    return folder


def is_complete(folder: Path) -> bool:
    """Return whether `made_in_place` has completed the folder."""
    return (folder / _COMPLETE).exists()


def made_in_place(folder: Path, make: Callable[[Path], None], within_s: float = MAKE_S) -> Path:
    """Create a folder like `made_once`, if it contains its own path, such as a virtual environment. Blocks."""
    if is_complete(folder):
        return folder
    complete = folder / _COMPLETE
    with off_clock(2 * within_s), exclusive(lock_of(folder)):
        if not complete.exists():
            remove(folder)
            try:
                make(folder)
                open_to_all(folder)
                complete.touch()
            except BaseException:
                remove(folder)
                raise
    return folder


def use_mark(folder: Path) -> Path:
    """Return the file next to a folder that sandboxes lock while they use it. Its time is that of the last use.

    It is not in the folder, because programs that see the folder could lock its files.
    """
    return folder.with_name(folder.name + ".use")


def used(folder: Path) -> Path:
    """Record the use of a folder (at intervals), for pruning, and return the folder."""
    now = time.monotonic()
    if now - _noted.get(folder, -_NOTE_S) >= _NOTE_S or not use_mark(folder).exists():
        # a home that cannot be written is not pruned from here either
        with suppress(OSError):
            use_mark(folder).touch()
            _noted[folder] = now
    return folder


@contextmanager
def failing_alike(folder: Path, requested_at: float) -> Iterator[None]:
    """Share a SandboxError of the block with all processes that wait for the folder: serial failures could take hours.

    `requested_at` is the time of the caller's request. Only for the process that creates the folder and holds its lock.
    """
    note = lock_of(folder).with_suffix(".failed")
    if note.exists() and note.stat().st_mtime >= requested_at:
        raise SandboxError(note.read_text())
    try:
        yield
    except SandboxError as error:
        # the disk may be full
        with suppress(OSError):
            note.write_text(str(error))
        raise
    note.unlink(missing_ok=True)


def remove_unfinished(folder: Path, held: bool) -> None:
    """Remove unfinished folders of killed processes. `held`: the caller holds the lock, so no other creates it."""
    for left in folder.parent.glob(folder.name + ".*"):
        kind = left.name.removeprefix(folder.name).split(".")[1]
        if (held and kind == "new") or (kind == "alone" and time.time() - left.lstat().st_mtime > _OLD_S):
            remove(left)


def _put(temporary: Path, folder: Path, good: Callable[[Path], bool]) -> None:
    """Rename it to the folder, unless that is good by now. An existing one is moved aside, because it may be in use."""
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        if not good(folder):
            folder.rename(folder.with_name(f"{folder.name}.old.{uuid4().hex[:8]}"))
            temporary.rename(folder)


def open_to_all(folder: Path, *, always: bool = False) -> None:
    """Let everyone read a tree, if this process's umask prevents that, or `always`."""
    if not always and not _umask() & 0o055:
        return
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent), *(Path(parent, name) for name in (*folders, *files))):
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode):
                path.chmod(mode | 0o444 | (0o111 if mode & 0o100 else 0))


def write(path: Path, text: str) -> None:
    """Write a file atomically, because other processes may read it meanwhile. Raises OSError."""
    new = path.with_name(f"{path.name}.{uuid4().hex[:8]}")
    try:
        new.write_text(text)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _umask() -> int:
    """Return this process's umask without changing it, because other threads create files, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


def fingerprint(path: Path, digests: Path, *, follow: bool = False) -> str:
    """Return the digest of a file's bytes, or of a folder's names, modes, links and files. Blocks.

    `digests` is the folder of the remembered digests. With `follow`, links in a folder count as their targets. Raises
    OSError if a file cannot be read or keeps changing.
    """
    for _ in range(_TRIES):
        stamp, newest = _look(path, follow)
        if stamp in _known:
            return _known[stamp]
        memo = digests / stamp
        try:
            content_digest = memo.read_text()
        except FileNotFoundError:
            content_digest = _read(path, follow)
            if _look(path, follow)[0] != stamp:
                continue
            if abs(time.time() - newest) < _SETTLED_S:
                return content_digest
            memo.parent.mkdir(parents=True, exist_ok=True)
            write(memo, content_digest)
        _known[stamp] = content_digest
        return content_digest
    raise OSError(f"{path} is being written: it changed while it was read")


def _look(path: Path, follow: bool) -> tuple[str, float]:
    """Return a digest of all metadata, without the contents, and the time of the last change, in s since 1970."""
    seen, newest = [], 0.0
    for relative, _, status in _tree(str(path), follow):
        size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
        seen.append((relative, status.st_mode, size, status.st_mtime_ns, status.st_ino))
        newest = max(newest, status.st_mtime, status.st_ctime)
    return digest("look", str(path.absolute()), follow, seen), newest


def _tree(path: str, follow: bool) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yield a path and everything below it in a fixed order: relative name, path and `stat` result."""
    status = Path(path).stat()
    yield "", path, status
    if stat.S_ISDIR(status.st_mode):
        yield from _below(path, "", follow, frozenset({(status.st_dev, status.st_ino)}))


def _below(
    path: str, relative: str, follow: bool, above: frozenset[tuple[int, int]]
) -> Iterator[tuple[str, str, os.stat_result]]:
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = f"{relative}/{entry.name}"
            leads_on = follow and Path(entry.path).exists()
            status = entry.stat(follow_symlinks=leads_on)
            yield name, entry.path, status
            file_id = (status.st_dev, status.st_ino)
            if stat.S_ISDIR(status.st_mode) and file_id not in above:
                yield from _below(entry.path, name, follow, above | {file_id})


def _read(path: Path, follow: bool) -> str:
    """Return the digest without times: copied or newly checked out files are the same content."""
    if path.is_file():
        return _digest_of(path)
    parts: list[tuple[str, int, str]] = []
    for relative, each, status in _tree(str(path), follow):
        content = ""
        if stat.S_ISLNK(status.st_mode):
            content = str(Path(each).readlink())
        elif stat.S_ISREG(status.st_mode):
            content = _digest_of(Path(each))
        parts.append((relative, status.st_mode, content))
    return digest("tree", parts)


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
