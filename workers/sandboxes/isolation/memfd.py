"""Count unnamed files that processes hold open, in memory (memfd, /dev/shm) or on disk. Standard library only.

Only files on the sandbox's own mounts are examined: a call to another file system, such as a dead network mount, can
block in the kernel, where SIGKILL has no effect.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from typing import TypeAlias

    Held: TypeAlias = dict[str, tuple[int, int]]

_OF_MEMORY = ("/memfd:", "/dev/shm/", "/SYSV", "/dev/zero")
_OWN = ("", "dev/shm", "run/farm")
_NAMELESS = " (deleted)"
_PIPE = "pipe:["
_PIPE_BYTES = 8192
"""Estimate for one pipe: its minimum of two pages. The fill level cannot be read from outside."""


def own_mounts(root: str) -> frozenset[int]:
    """Return the ids of the writable mounts below a sandbox's root, and of the kernel's mount for memory files."""
    memory = os.memfd_create("")
    descriptors = [memory]
    try:
        for folder in _OWN:
            descriptors.append(os.open(root, os.O_PATH | os.O_CLOEXEC))
            # O_NOFOLLOW: a link could lead to a folder of the host
            for name in filter(None, folder.split("/")):
                flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptors.append(os.open(name, flags, dir_fd=descriptors[-1]))
            # parent folders of a target are on another mount of the sandbox or on the same one
        return frozenset(_mount(f"/proc/self/fdinfo/{descriptor}") for descriptor in descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def held(proc: int, pids: Iterable[str], mounts: Collection[int]) -> Held:
    """Return bytes of memory and of disk for each process, for the unnamed files on `mounts` and for pipes.

    A file that several processes hold is counted for the first of them. `proc` is a descriptor of a /proc.
    """
    seen: set[object] = set()
    usage = {}
    for pid in pids:
        memory = disk = 0
        for number in _descriptors(proc, pid):
            path = f"{pid}/fd/{number}"
            with contextlib.suppress(OSError, ValueError, StopIteration):
                name = _name(path, proc)
                if name.startswith(_PIPE):
                    memory += _PIPE_BYTES * (name not in seen)
                    seen.add(name)
                    continue
                if not name.endswith(_NAMELESS) or _mount(f"{pid}/fdinfo/{number}", proc) not in mounts:
                    continue
                status = os.stat(path, dir_fd=proc)
                if not stat.S_ISREG(status.st_mode) or status.st_nlink or (status.st_dev, status.st_ino) in seen:
                    continue
                seen.add((status.st_dev, status.st_ino))
                if name.startswith(_OF_MEMORY):
                    memory += 512 * status.st_blocks
                else:
                    disk += 512 * status.st_blocks
        usage[pid] = (memory, disk)
    return usage


def opened(proc: int, pids: Iterable[str], mounts: Collection[int]) -> dict[str, int]:
    """Return, for each process, the disk bytes of the regular files on `mounts` that it has open, named or unnamed."""
    disk_bytes = {}
    for pid in pids:
        total = 0
        for number in _descriptors(proc, pid):
            with contextlib.suppress(OSError, ValueError, StopIteration):
                if _name(f"{pid}/fd/{number}", proc).startswith("/") and (
                    _mount(f"{pid}/fdinfo/{number}", proc) in mounts
                ):
                    status = os.stat(f"{pid}/fd/{number}", dir_fd=proc)
                    total += 512 * status.st_blocks if stat.S_ISREG(status.st_mode) else 0
        disk_bytes[pid] = total
    return disk_bytes


def sockets(proc: int, pids: Iterable[str]) -> dict[str, set[int]]:
    """Return, for each process, the inodes of its open sockets."""
    inodes = {}
    for pid in pids:
        inodes[pid] = set[int]()
        for number in _descriptors(proc, pid):
            with contextlib.suppress(OSError, ValueError):
                name = _name(f"{pid}/fd/{number}", proc)
                if name.startswith("socket:["):
                    inodes[pid].add(int(name[8:-1]))
    return inodes


def _name(path: str, proc: int) -> str:
    """Return the name that the kernel shows for an open file. Calls no file system, so it cannot block."""
    try:
        return os.readlink(path, dir_fd=proc)
    except OSError as error:
        # too deeply nested to be shown; assumed to be unnamed
        if error.errno != errno.ENAMETOOLONG:
            raise
        return _NAMELESS


def _mount(path: str, proc: int | None = None) -> int:
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)) as file:
        return int(next(line for line in file if line.startswith("mnt_id:")).split()[1])


def _descriptors(proc: int, pid: str) -> list[str]:
    try:
        folder = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:
        return []
    try:
        return os.listdir(folder)
    except OSError:
        # the process ended
        return []
    finally:
        os.close(folder)
