"""Folders named by their content and created once: the caches of images, layers and environments.

If several processes (or several nodes with a shared home) need the same folder, one creates it and the others wait.
Neither time counts towards the time limit of a stage (`workers/stage_clock.py`), up to the time of two attempts: one
that is waited for, and a second one if it failed.
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
