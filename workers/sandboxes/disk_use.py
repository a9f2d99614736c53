# ruff: noqa: PTH208
"""The growth of a sandbox on its node's disk, to tell a policy that fills the disk from one that finds it full."""

from __future__ import annotations

import contextlib
import math
import os
import time
from operator import sub
from pathlib import Path

from workers.sandboxes.isolation.layer_size import size_of_few, usage_and_closed
from workers.sandboxes.isolation.memfd import held, own_mounts

_SHARE = 2
_NEAR_S = 1.0
_MOST_OF_THE_TIME = 10
"""Of ten seconds, measuring takes one of CPU time."""


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
        self._filled = False
        self._due = 0.0
        self._much_at = self._full_at = -math.inf

    def close(self) -> None:
        os.close(self._folder)

    def look(self, *, full: bool) -> None:
        """Measure it if the disk is full, or nearly so and has less than half of the room it had.

        A file can be gone as soon as the disk is full, so what was there shortly before counts, too.
        """
        now = time.monotonic()
        if full:
            self._full_at = now
        if now >= self._due and (full or any(map(_is_much, self._room, map(sub, self._room, self._left())))):
            began = time.thread_time()
            if self._takes_much():
                self._much_at = now
            ended = time.monotonic()
            # on a busy machine most of the time is spent waiting for a processor
            self._due = ended + max(_MOST_OF_THE_TIME * (time.thread_time() - began), ended - now)
        self._filled = self._filled or abs(self._much_at - self._full_at) < _NEAR_S

    def filled_the_disk(self) -> bool:
        """Return whether it took half of the room or more, in bytes or in files, within a second of a full disk.

        So it is taken to have if it closed a folder to its own user, as that hides what is in it.
        """
        return self._filled

    def _takes_much(self) -> bool:
        found = size_of_few(self._folder)
        n_bytes, n_files, n_closed = (*found, 0) if found else usage_and_closed(self._folder)
        n_bytes += self._nameless()
        return n_closed > 0 or any(map(_is_much, self._room, map(sub, (n_bytes, n_files), self._before)))

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


def _is_much(room: int, taken: int) -> bool:
    return room > 0 and taken >= room / _SHARE
