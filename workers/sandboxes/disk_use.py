# ruff: noqa: PTH208
"""Disk usage of a sandbox on its node, to distinguish a policy that fills the disk from one that finds it full."""

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
"""Ratio of time to measuring time: one second of CPU time in ten."""


class DiskUse:
    """The growth of a sandbox since this object was created, compared with the free space of the disk at that time.

    `folder` belongs to the sandbox, `first_pid` is its first process. Raises OSError if the sandbox is gone.
    """

    def __init__(self, folder: Path, first_pid: int) -> None:
        self._path = folder
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._first_pid = first_pid
        self._room = self._left()
        # with many files, measuring is too slow for the start of each rollout
        self._before = size_of_few(self._folder) or (0, 0)
        self._filled = False
        self._due = 0.0
        self._much_at = self._full_at = -math.inf

    def close(self) -> None:
        os.close(self._folder)

    def look(self, *, full: bool) -> None:
        """Measure the sandbox if the disk is full, or nearly full with less than half of the original free space.

        Usage shortly before the disk became full counts, too, because the files can be deleted immediately afterwards.
        """
        now = time.monotonic()
        if full:
            self._full_at = now
        if now >= self._due and (full or any(map(_is_much, self._room, map(sub, self._room, self._left())))):
            began = time.thread_time()
            if self._takes_much():
                self._much_at = now
            ended = time.monotonic()
            # CPU time is counted, because on a busy machine most of the elapsed time is spent waiting for a processor
            self._due = ended + max(_MOST_OF_THE_TIME * (time.thread_time() - began), ended - now)
        self._filled = self._filled or abs(self._much_at - self._full_at) < _NEAR_S

    def filled_the_disk(self) -> bool:
        """Return whether the sandbox used at least half of the free bytes or inodes within a second of a full disk.

        A sandbox with a folder that its own user cannot read also counts, because the folder can hide its usage.
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
        """Return the size in bytes of deleted files that the sandbox's processes still have open."""
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
