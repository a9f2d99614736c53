"""Layers that are prepared once for all samples of an instance: read-only, between their image and their own changes.

A sandbox is prepared and stopped, and its writable layer kept; the samples start on top of it and prepare nothing. The
layers of a container image are that, too: deleted files are marks that an overlay understands wherever they lie. As
there, two names of one file part when it is changed by one of them.

Layers lie on the node's own disk, `layers/NAME/files`, and appear whole or not at all. One in use is never removed: a
start of a sandbox on it holds its lock, and a sandbox that runs on it has a link to it in its folder.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from farm.settings import settings
from workers.sandboxes.lifecycle.state import folder_of_all
from workers.sandboxes.remove_tree import remove
from workers.sandboxes.sandbox_user import sandbox_user

LEFT = "left-"
"""Begins the names of layers that the policy left in a sandbox, kept until they are scored."""
_LEFT_S = 12 * 3600.0
"""Seconds for which such a layer waits for its scoring."""
LINK = "layer"
"""In the folder of a sandbox: leads nowhere, but names the layer that it stands on."""
WRITTEN = "upper"
"""In the folder of a sandbox: all that was written in it."""
_FILES, _LOCK = "files", "lock"
_NEW, _GONE = ".new", ".gone"


def folder_of_layers() -> Path:
    return settings().scratch.absolute() / "layers"


def exists(name: str) -> bool:
    return (folder_of_layers() / name).is_dir()


@contextmanager
def held(name: str) -> Iterator[Path | None]:
    """The layer's files, not to be removed while the block runs; None if there is no such layer."""
    place = folder_of_layers() / name
    try:
        descriptor = os.open(place / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield place / _FILES if _use(place, descriptor) else None
    finally:
        os.close(descriptor)


def _use(place: Path, descriptor: int) -> bool:
    """Note that it is used; False if it was removed before the lock was had."""
    try:
        os.utime(place)
        return os.path.samestat(os.fstat(descriptor), (place / _LOCK).stat())
    except FileNotFoundError:
        return False


def mark(state: Path, name: str) -> None:
    """Note in a sandbox's folder that it stands on a layer, whose lock is held."""
    (state / LINK).symlink_to(name)


def below(state: Path) -> tuple[str, ...]:
    """Return the layer that a sandbox stands on, beside those of its image, if it does on one."""
    try:
        return (str(folder_of_layers() / (state / LINK).readlink().name / _FILES),)
    except OSError:
        return ()


def detach(state: Path) -> Path:
    """Take the writable layer out of a sandbox's folder, which is to be stopped before the layer is `publish`ed."""
    new = folder_of_layers() / f"{_NEW}.{uuid4().hex[:8]}"
    new.mkdir(parents=True)
    (new / _LOCK).touch()
    # the mount follows it
    (state / WRITTEN).rename(new / _FILES)
    return new


def files_of(new: Path) -> Path:
    """Return the files of a layer that was detached and is not published."""
    return new / _FILES


def publish(new: Path, name: str) -> None:
    """From now on it is the layer of that name, unless there is one. Blocks."""
    try:
        new.rename(new.with_name(name))
    except OSError:
        remove(new)


def begin() -> Path:
    """Return a new layer without files, to be filled and `publish`ed; its files are to be the sandbox user's."""
    new = folder_of_layers() / f"{_NEW}.{uuid4().hex[:8]}"
    (new / _FILES).mkdir(parents=True)
    (new / _LOCK).touch()
    if user := sandbox_user():
        os.chown(new / _FILES, *user)
    return new


def discard(name: str) -> None:
    """Remove a layer that is not needed any more; one in use stays for the sweep. Blocks."""
    with suppress(FileNotFoundError):
        gone = _taken_out(folder_of_layers() / name)
        if gone is not None:
            remove(gone)


def sweep(idle_s: float) -> None:
    """Remove the layers that no sandbox stands on and that were not used for `idle_s` seconds. Blocks.

    Those that a policy left wait longer for their scoring, unless `idle_s` is 0.
    """
    parent = folder_of_layers()
    for place in sorted(parent.iterdir()) if parent.is_dir() else ():
        with suppress(FileNotFoundError):
            wait_s = max(idle_s, _LEFT_S) if idle_s and place.name.startswith(LEFT) else idle_s
            if time.time() - place.stat().st_mtime < wait_s and not place.name.startswith(_GONE):
                continue
            gone = place if place.name.startswith(".") else _taken_out(place)
            if gone is not None:
                remove(gone)


def _taken_out(place: Path) -> Path | None:
    """Rename the layer so that it is not found any more; returns its new path, None if it is in use."""
    descriptor = os.open(place / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if place.name in _in_use():
            return None
        return place.rename(place.with_name(f"{_GONE}.{uuid4().hex[:8]}"))
    except BlockingIOError:
        return None
    finally:
        os.close(descriptor)


def _in_use() -> set[str]:
    """The layers that the sandboxes of this node stand on."""
    names = set()
    for state in folder_of_all().iterdir():
        # most stand on none
        with suppress(OSError):
            names.add((state / LINK).readlink().name)
    return names
