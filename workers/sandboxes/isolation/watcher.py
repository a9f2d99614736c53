# ruff: noqa: PTH116, PTH118, PTH123, PTH208
"""The process that monitors all sandboxes of a node, each as described in `limits.py`. Standard library only.

A sandbox's monitor forks it if none is running. It finds the sandboxes by their record files and exits after the last
one has ended. If it is killed, there is none until the next sandbox starts. Because reads of /proc can block, it runs
under `hang_guard` and skips processes that did not answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import time

from workers.sandboxes.isolation import namespaces
from workers.sandboxes.isolation.hang_guard import Checkpoint, guarded
from workers.sandboxes.isolation.limits import BUSY_S, LimitWatch
from workers.sandboxes.isolation.parent_death_pipe import continue_at_the_end

RECORD = "sandbox.json"
_IDLE_S = 2.0


class LimitWatches:
    """The limit watches of all sandboxes in a folder."""

    def __init__(self, folder: str, checkpoint: Checkpoint) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._watches: dict[tuple[int, int], LimitWatch] = {}
        self._find_due = 0.0

    def check(self) -> bool:
        """Check each sandbox that is due. Returns whether there are any sandboxes."""
        now = time.monotonic()
        if not self._watches or now >= self._find_due:
            self._find()
            self._find_due = now + BUSY_S
        for name, watch in list(self._watches.items()):
            try:
                watch.check(now)
            except namespaces.SandboxGone:
                # the monitor was killed too; the reaper removes the folder
                self._watches.pop(name).close()
            except (OSError, ValueError, IndexError):
                # an error in one sandbox must not stop the checks of the others
                continue
        return bool(self._watches)

    def pause_s(self) -> float:
        """Return the seconds until the next check or the next search for new sandboxes."""
        now = time.monotonic()
        return max(0.0, min([self._find_due - now, *(watch.due_in(now) for watch in self._watches.values())]))

    def _find(self) -> None:
        """Find new sandboxes. The key is inode and time of the record: folders are renamed, and inodes are reused."""
        records = {}
        for name in os.listdir(self._folder):
            path = os.path.join(self._folder, name)
            with contextlib.suppress(OSError):
                status = os.stat(os.path.join(path, RECORD))
                records[status.st_ino, status.st_mtime_ns] = path
        for inode in self._watches.keys() - records.keys():
            self._watches.pop(inode).close()
        for inode in records.keys() - self._watches.keys():
            with contextlib.suppress(OSError, ValueError, KeyError, namespaces.SandboxGone):
                with open(os.path.join(records[inode], RECORD)) as file:
                    record = json.load(file)
                # skipped if even its root did not answer
                if self._checkpoint.at(str(record["pid1"])):
                    self._watches[inode] = LimitWatch(records[inode], record, record["limits"], self._checkpoint)


def watch_over(folder: str, lifeline: int) -> None:
    """Fork the watcher of a folder of sandboxes, unless one holds the lock on the folder.

    It exits by itself. If it is stopped, closing the other end of `lifeline` continues it; `lifeline` must be a
    descriptor that was opened for the watcher alone.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fork() == 0:
            continue_at_the_end(lifeline, os.getpid())
            os.setsid()
            null = os.open("/dev/null", os.O_RDWR)
            namespaces.place({0: null, 1: null, 2: null, 3: lock, 4: lifeline})
            os.chdir("/")
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            with contextlib.suppress(OSError):
                guarded(lambda checkpoint: _watch_until_idle(folder, checkpoint))
            os._exit(0)
    os.close(lock)


def _watch_until_idle(folder: str, checkpoint: Checkpoint) -> None:
    watches = LimitWatches(folder, checkpoint)
    idle_since = time.monotonic()
    while True:
        if watches.check():
            idle_since = time.monotonic()
        elif time.monotonic() - idle_since > _IDLE_S:
            fcntl.flock(3, fcntl.LOCK_UN)
            # a sandbox that started just now saw the lock, so it forked no watcher
            if not watches.check():
                return
            fcntl.flock(3, fcntl.LOCK_EX | fcntl.LOCK_NB)
        checkpoint.at()
        time.sleep(watches.pause_s())
