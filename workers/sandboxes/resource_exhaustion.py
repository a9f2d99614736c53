"""Messages for resources that a worker or its node has run out of: not a sandbox's fault, and fixed from outside."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from farm.errors import SandboxError

_MIN_BYTES, _MIN_FILES = 1 << 16, 8
REMEDIES = {
    errno.EMFILE: "it has no file descriptor left: start it with a higher `ulimit -n`",
    errno.ENFILE: "the node has no file descriptor left: raise the sysctl fs.file-max",
    errno.EAGAIN: "the node lets this user have no more processes: raise `ulimit -u`",
    errno.ENOMEM: "the node has no memory left: run fewer rollouts at a time",
    errno.ENOSPC: "the disk is full: free some, or set FARM_SCRATCH to another",
    errno.ETOOMANYREFS: "this user has too many descriptors on their way in messages: raise `ulimit -n`",
    errno.EDQUOT: "the disk quota is used up: free some, or set FARM_SCRATCH to another disk",
}


def reason(error: OSError) -> str:
    """Return why a call failed and how to fix that."""
    return REMEDIES.get(error.errno or 0) or error.strerror or str(error)


def disk_is_full(folder: Path) -> str:
    """Return a message if the disk is full, else an empty one. The error may not say so, as overlays turn read-only."""
    room = os.statvfs(folder)
    full = room.f_bavail * room.f_frsize < _MIN_BYTES or (room.f_files and room.f_favail < _MIN_FILES)
    return REMEDIES[errno.ENOSPC] if full else ""


def shortage(error: OSError, folder: Path) -> str:
    """Return the resource that the node lacked when a write to a folder failed; empty if the cause was another."""
    return REMEDIES.get(error.errno or 0) or disk_is_full(folder)


@contextmanager
def scarcity(what: str) -> Iterator[None]:
    """Turn an OSError of the block into a SandboxError that names the failed action and the missing resource."""
    try:
        yield
    except OSError as error:
        raise SandboxError(f"this worker could not {what}: {reason(error)}") from error
