# ruff: noqa: PTH208
"""The growth of a sandbox on its node's disk, to tell a policy that fills the disk from one that finds it full."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from workers.sandboxes.isolation.layer_size import size_of_few, usage_and_closed
from workers.sandboxes.isolation.memfd import held, own_mounts

_SHARE = 2
_MOST_OF_THE_TIME = 10
"""Of ten seconds, measuring takes one."""


class DiskUse:
    """The growth of a sandbox since this was made, beside the room that its disk had then.

    `folder` is the sandbox's, `first_pid` its first process. Raises OSError if it is gone.
    """

    def __init__(self, folder: Path, first_pid: int) -> None:
        self._path = folder
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._first_pid = first_pid
        self._room = self._left()
        # of more than a few files it is too slow for the start of each rollout
        self._before = size_of_few(self._folder) or (0, 0)
        self._most = (0, 0)
        self._has_closed = False
        self._due = 0.0

    def close(self) -> None:
        os.close(self._folder)

    def look(self) -> None:
        """Measure it, as the disk is full now."""
        began = time.monotonic()
        if began < self._due:
            return
        found = size_of_few(self._folder)
        n_bytes, n_files, n_closed = (*found, 0) if found else usage_and_closed(self._folder)
        self._has_closed = self._has_closed or n_closed > 0
        n_bytes += self._nameless()
        self._most = max(self._most[0], n_bytes), max(self._most[1], n_files)
        ended = time.monotonic()
        self._due = ended + _MOST_OF_THE_TIME * (ended - began)

    def filled_the_disk(self) -> bool:
        """Return whether it had taken half of the room or more, in bytes or in files, when the disk was full.

        So it is taken to have if it closed a folder to its own user, as that hides what is in it.
        """
        return self._has_closed or any(
            room and most - before >= room / _SHARE
            for room, most, before in zip(self._room, self._most, self._before, strict=True)
        )

    def _left(self) -> tuple[int, int]:
        found = os.statvfs(self._path)
        return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else 0

    def _nameless(self) -> int:
        """Return the bytes of files that its processes have open, and that have no name any more."""
        with contextlib.suppress(OSError):
            root = f"/proc/{self._first_pid}/root"
            proc = os.open(f"{root}/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                pids = [name for name in os.listdir(proc) if name.isdigit()]
                return sum(disk for _, disk in held(proc, pids, own_mounts(root)).values())
            finally:
                os.close(proc)
        return 0
