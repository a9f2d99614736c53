# ruff: noqa: PTH116, PTH118, PTH123, PTH208
"""The one process of a node that looks after its sandboxes, each as in `limits.py`; standard library only.

It is forked by a monitor that finds none, finds the sandboxes by their records, and ends with the last of them; killed,
there is none until the next sandbox starts. It may block when it reads of a process that sleeps in the kernel, so it
has a guard, and skips what did not answer.
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
_ALONE_S = 2.0


class LimitWatches:
    """Of all sandboxes in a folder."""

    def __init__(self, folder: str, place: Checkpoint) -> None:
        self._folder = folder
        self._place = place
        self._watches: dict[tuple[int, int], LimitWatch] = {}
        self._find_due = 0.0

    def look(self) -> bool:
        """At each that is due; whether there are any."""
        now = time.monotonic()
        if not self._watches or now >= self._find_due:
            self._find()
            self._find_due = now + BUSY_S
        for name, watch in list(self._watches.items()):
            try:
                watch.look(now)
            except namespaces.SandboxGone:
                # its monitor was killed too, and its folder waits to be swept
                self._watches.pop(name).close()
            except (OSError, ValueError, IndexError):
                # whatever goes wrong with one, the others are looked after
                continue
        return bool(self._watches)

    def pause_s(self) -> float:
        """Return the seconds until one is due, or new ones are to be looked for."""
        now = time.monotonic()
        return max(0.0, min([self._find_due - now, *(watch.due_in(now) for watch in self._watches.values())]))

    def _find(self) -> None:
        """Sandboxes are known by their records' inodes, and times, as their names change and inodes are given again."""
        there = {}
        for name in os.listdir(self._folder):
            path = os.path.join(self._folder, name)
            with contextlib.suppress(OSError):
                result = os.stat(os.path.join(path, RECORD))
                there[result.st_ino, result.st_mtime_ns] = path
        for inode in self._watches.keys() - there.keys():
            self._watches.pop(inode).close()
        for inode in there.keys() - self._watches.keys():
            with contextlib.suppress(OSError, ValueError, KeyError, namespaces.SandboxGone):
                with open(os.path.join(there[inode], RECORD)) as file:
                    record = json.load(file)
                # nor is one looked at again whose very root does not answer
                if self._place.at(str(record["pid1"])):
                    self._watches[inode] = LimitWatch(there[inode], record, record["limits"], self._place)


def watch_over(folder: str, lifeline: int) -> None:
    """Fork the watcher of a folder of sandboxes, if there is none. The folder's own lock shows that.

    It ends by itself; stopped, it goes on for that when the other end of `lifeline` is closed, which it has to itself.
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
                guarded(lambda place: _watch_until_alone(folder, place))
            os._exit(0)
    os.close(lock)


def _watch_until_alone(folder: str, place: Checkpoint) -> None:
    watcher = LimitWatches(folder, place)
    alone_since = time.monotonic()
    while True:
        if watcher.look():
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > _ALONE_S:
            fcntl.flock(3, fcntl.LOCK_UN)
            # one that started just now has seen the lock, and forked no other
            if not watcher.look():
                return
            fcntl.flock(3, fcntl.LOCK_EX | fcntl.LOCK_NB)
        place.at()
        time.sleep(watcher.pause_s())
