"""The node-local folder of a farm's process: private, and named so that two farms on one machine do not collide."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from pathlib import Path
from typing import IO

from farm.errors import Conflict, NotAllowed


def own_folder(scratch: Path, name: str, identity: str) -> Path:
    """Return `scratch/NAME-DIGEST`, creating it; `identity` distinguishes it, e.g. the store's URL.

    Others may pass through it, since sandboxes run as another user when the farm is root's; they cannot list it.
    Raises NotAllowed if another user created the folder first, as anyone can in a shared /tmp.
    """
    folder = scratch.absolute() / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    for each in (scratch.absolute(), folder):
        each.mkdir(mode=0o711, parents=True, exist_ok=True)
        result = each.lstat()
        if not stat.S_ISDIR(result.st_mode) or result.st_uid != os.getuid():
            raise NotAllowed(f"{each} belongs to another user: set FARM_SCRATCH to a local folder of your own")
        if result.st_mode & 0o022 or not result.st_mode & 0o001:
            each.chmod(0o711)
    return folder


def locked(path: Path, what: str) -> IO[str]:
    """Hold a lock file until the returned file is closed or this process ends, however it ends. Raises Conflict."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise Conflict(what) from None
    return file
