"""Read-only layers that are prepared once for all samples of an instance, between the image and the writable layer.

A sandbox is prepared and stopped, and its writable layer is kept. The samples start on top of it and prepare nothing.
The layers of a container image work the same way: deleted files are marked so that an overlay understands the marks in
any layer. As in an image, hard links become separate files when one of them is changed.

Layers lie on the node's own disk in `layers/NAME/files`, and appear completely or not at all. A layer in use is never
removed: a sandbox's start holds the layer's lock, and a running sandbox's folder contains a link to it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from workers.config import SandboxConfig
from workers.sandboxes.remove_tree import remove
from workers.sandboxes.sandbox_user import sandbox_user

LEFT = "left-"
"""Prefix of layers with the files that a policy left in its sandbox, kept until they are evaluated."""
_LEFT_S = 12 * 3600.0
"""Seconds for which such a layer is kept for its evaluation."""
LINK = "layer"
"""Dangling link in the folder of a sandbox. Its target is the name of the layer below the sandbox."""
WRITTEN = "upper"
"""Folder, in that of a sandbox, with all files written in the sandbox."""
_FILES, _LOCK = "files", "lock"
_NEW, _GONE = ".new", ".gone"


def exists(config: SandboxConfig, name: str) -> bool:
    return (config.layers_folder / name).is_dir()


@contextmanager
def held(config: SandboxConfig, name: str) -> Iterator[Path | None]:
    """Yield the layer's files, protected from removal while the block runs; None if there is no such layer."""
    layer = config.layers_folder / name
    try:
        descriptor = os.open(layer / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield layer / _FILES if _use(layer, descriptor) else None
    finally:
        os.close(descriptor)


def _use(layer: Path, descriptor: int) -> bool:
    """Update the time of last use. Returns False if the layer was removed before this process got its lock."""
    try:
        os.utime(layer)
        return os.path.samestat(os.fstat(descriptor), (layer / _LOCK).stat())
    except FileNotFoundError:
        return False


def mark(state: Path, name: str) -> None:
    """Record in a sandbox's folder the layer that it uses. The caller holds the layer's lock."""
    (state / LINK).symlink_to(name)


def below(config: SandboxConfig, state: Path) -> tuple[str, ...]:
    """Return the prepared layer below a sandbox, without those of its image; empty if there is none."""
    try:
        return (str(config.layers_folder / (state / LINK).readlink().name / _FILES),)
    except OSError:
        return ()


def detach(config: SandboxConfig, state: Path) -> Path:
    """Move the writable layer out of a sandbox's folder. Stop the sandbox before the layer is `publish`ed."""
    new = config.layers_folder / f"{_NEW}.{uuid4().hex[:8]}"
    new.mkdir(parents=True)
    (new / _LOCK).touch()
    # the mount follows the renamed folder
    (state / WRITTEN).rename(new / _FILES)
    return new


def files_of(new: Path) -> Path:
    """Return the files of a layer that is detached and not yet published."""
    return new / _FILES


def publish(new: Path, name: str) -> None:
    """Make it the layer `name`, or delete it if that layer exists already. Blocks."""
    try:
        new.rename(new.with_name(name))
    except OSError:
        remove(new)


def begin(config: SandboxConfig) -> Path:
    """Return a new empty layer, to be filled and `publish`ed. Its files must belong to the sandbox user."""
    new = config.layers_folder / f"{_NEW}.{uuid4().hex[:8]}"
    (new / _FILES).mkdir(parents=True)
    (new / _LOCK).touch()
    if user := sandbox_user(config.user):
        os.chown(new / _FILES, *user)
    return new


def discard(config: SandboxConfig, name: str) -> None:
    """Remove a layer that is no longer needed. If it is in use, the sweep removes it later. Blocks."""
    with suppress(FileNotFoundError):
        gone = _taken_out(config, config.layers_folder / name)
        if gone is not None:
            remove(gone)


def sweep(config: SandboxConfig, idle_s: float) -> None:
    """Remove layers that no sandbox uses and that were not used for `idle_s` seconds. Blocks.

    Layers left by a policy are kept longer for their evaluation, unless `idle_s` is 0.
    """
    parent = config.layers_folder
    for layer in sorted(parent.iterdir()) if parent.is_dir() else ():
        with suppress(FileNotFoundError):
            wait_s = max(idle_s, _LEFT_S) if idle_s and layer.name.startswith(LEFT) else idle_s
            if time.time() - layer.stat().st_mtime < wait_s and not layer.name.startswith(_GONE):
                continue
            gone = layer if layer.name.startswith(".") else _taken_out(config, layer)
            if gone is not None:
                remove(gone)


def _taken_out(config: SandboxConfig, layer: Path) -> Path | None:
    """Rename the layer so that it is not found any more. Returns its new path, None if it is in use."""
    descriptor = os.open(layer / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if layer.name in _in_use(config):
            return None
        return layer.rename(layer.with_name(f"{_GONE}.{uuid4().hex[:8]}"))
    except BlockingIOError:
        return None
    finally:
        os.close(descriptor)


def _in_use(config: SandboxConfig) -> set[str]:
    names = set()
    for state in config.sandboxes_folder.iterdir():
        # most sandboxes use none
        with suppress(OSError):
            names.add((state / LINK).readlink().name)
    return names
