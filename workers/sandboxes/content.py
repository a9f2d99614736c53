"""Folders named by what is in them, made once: the caches of images, layers and environments.

Several processes, and several nodes on a shared home, may want the same one at once: one makes it, the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_COMPLETE = ".complete"


def digest(*parts: object) -> str:
    """A name for content that is known by these JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder; if there is none, `make(temporary)` fills one, which then appears whole under its name. Blocks."""
    if folder.is_dir():
        return folder
    with _locked(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            # a farm's umask may be tight; the sandbox's user must be able to read what is made
            mask = os.umask(0o022)
            temporary = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
            try:
                temporary.chmod(0o755)
                make(temporary)
                temporary.rename(folder)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            finally:
                os.umask(mask)
    return folder


def made_in_place(folder: Path, make: Callable[[Path], None]) -> Path:
    """Like `made_once` for folders that know their own path, such as virtual environments. Blocks."""
    complete = folder / _COMPLETE
    if complete.exists():
        return folder
    with _locked(folder.with_name(folder.name + ".lock")):
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            complete.touch()
    return folder
