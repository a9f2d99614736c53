"""Folders named by what is in them, made once: the caches of images, layers and environments.

Several processes, and several nodes on a shared home, may need the same one at once: one makes it, the others wait.
Neither counts towards the time limit of a stage that needs it (`workers/stage_clock.py`), for as long as two attempts
may take: one that is waited for, and one that follows if it failed.
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
from workers.sandboxes.images.shared_lock import alone
from workers.sandboxes.remove_tree import remove
from workers.stage_clock import off_clock

MAKE_S = 900.0
"""Seconds that making a folder may take, by default."""
PARTS = ("archives", "environments", "programs")
"""The caches of what is laid over or bound into sandboxes beside their images, each with a folder for each content."""
_COMPLETE = ".complete"
_NOTE_S = 30.0
_noted: dict[Path, float] = {}
_OLD_S = 600.0
"""Seconds after its last change at which a folder that was made without the lock counts as abandoned."""


def digest(*parts: object) -> str:
    """Return a name for content that is identified by these JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def lock_of(folder: Path) -> Path:
    """Return the lock file of a folder that is made once."""
    return folder.with_name(folder.name + ".lock")


def made_once(
    folder: Path,
    make: Callable[[Path], None],
    good: Callable[[Path], bool] = Path.is_dir,
    *,
    private: bool = False,
    within_s: float = MAKE_S,
) -> Path:
    """Return the folder, if it is `good`; else `make(temporary)` fills one, which is then renamed to it. Blocks.

    Anyone may read it, whatever the umask, as sandboxes may run as another user; `private` leaves modes as made.
    `within_s`: seconds that making it may take by its own limits.
    """
    if good(folder):
        return folder
    with off_clock(2 * within_s), alone(lock_of(folder)) as held:
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
    """Return whether `made_in_place` has made the folder."""
    return (folder / _COMPLETE).exists()


def made_in_place(folder: Path, make: Callable[[Path], None], within_s: float = MAKE_S) -> Path:
    """Do as `made_once` for folders that contain their own path, such as virtual environments. Blocks."""
    if is_complete(folder):
        return folder
    complete = folder / _COMPLETE
    with off_clock(2 * within_s), alone(lock_of(folder)):
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
    """Return the file beside a folder that sandboxes which use it hold, and whose time is that of its last use.

    It is beside it, as what is in the folder can be locked by whoever it is bound to.
    """
    return folder.with_name(folder.name + ".use")


def used(folder: Path) -> Path:
    """Note the use of a folder, now and then, for pruning; return it."""
    now = time.monotonic()
    if now - _noted.get(folder, -_NOTE_S) >= _NOTE_S or not use_mark(folder).exists():
        # a home that cannot be written is not pruned from here either
        with suppress(OSError):
            use_mark(folder).touch()
            _noted[folder] = now
    return folder


@contextmanager
def failing_alike(folder: Path, asked_at: float) -> Iterator[None]:
    """Let a SandboxError of the block be that of all that wait for the folder: one by one, the last would take hours.

    `asked_at`: since when the caller wants it. For the one that makes it, and so has its lock.
    """
    note = lock_of(folder).with_suffix(".failed")
    if note.exists() and note.stat().st_mtime >= asked_at:
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
    """Remove what killed processes left unfinished. `held`: the caller has the folder's lock, so no other makes it."""
    for left in folder.parent.glob(folder.name + ".*"):
        kind = left.name.removeprefix(folder.name).split(".")[1]
        if (held and kind == "new") or (kind == "alone" and time.time() - left.lstat().st_mtime > _OLD_S):
            remove(left)


def _put(temporary: Path, folder: Path, good: Callable[[Path], bool]) -> None:
    """Rename it to the folder. An existing one is moved aside, as sandboxes may use it, unless it is good by now."""
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        if not good(folder):
            folder.rename(folder.with_name(f"{folder.name}.old.{uuid4().hex[:8]}"))
            temporary.rename(folder)


def open_to_all(folder: Path, *, always: bool = False) -> None:
    """Let anyone read a tree, if this process makes files that only some can; or `always`, whoever set their modes."""
    if not always and not _umask() & 0o055:
        return
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent), *(Path(parent, name) for name in (*folders, *files))):
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode):
                path.chmod(mode | 0o444 | (0o111 if mode & 0o100 else 0))


def _umask() -> int:
    """Return this process's umask, read without changing it, as other threads make files too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))
