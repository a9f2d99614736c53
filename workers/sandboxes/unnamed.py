# ruff: noqa: PTH208
"""Files without a name, of memory or of disk, that last as long as a process holds them; standard library only."""

from __future__ import annotations

import contextlib
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeAlias

    Held: TypeAlias = dict[str, tuple[int, int]]

_OF_MEMORY = ("/memfd:", "/dev/shm/", "/SYSV", "/dev/zero")  # noqa: S108


def held(proc: int, pids: Iterable[str]) -> Held:
    """Of each process below a /proc, by descriptor: bytes of memory and of disk, each file counted once."""
    seen: set[tuple[int, int]] = set()
    found = {}
    for pid in pids:
        memory = disk = 0
        for path in _descriptors(proc, pid):
            with contextlib.suppress(OSError):
                status = os.stat(path, dir_fd=proc)
                if not stat.S_ISREG(status.st_mode) or status.st_nlink or (status.st_dev, status.st_ino) in seen:
                    continue
                seen.add((status.st_dev, status.st_ino))
                if os.readlink(path, dir_fd=proc).startswith(_OF_MEMORY):
                    memory += 512 * status.st_blocks
                else:
                    disk += 512 * status.st_blocks
        found[pid] = (memory, disk)
    return found


def _descriptors(proc: int, pid: str) -> list[str]:
    try:
        folder = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:
        return []
    try:
        return [f"{pid}/fd/{number}" for number in os.listdir(folder)]
    finally:
        os.close(folder)
