"""The process that monitors all sandboxes of a node, each as described in `limits.py`. Standard library only.

A sandbox's monitor forks it if none is running. It finds the sandboxes by their record files and exits after the last
one has ended. If it is killed, there is none until the next sandbox starts.

Reading /proc files of a process (open files, memory, since about Linux 6.16 also its state) takes locks that a process
blocked on a dead disk can hold. There is no way to know in advance, and a thread cannot be killed. So the checks run in
a child process, which is restarted without the step that blocked.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import resource
import select
import signal
import time
from collections.abc import Callable

from workers.sandboxes.isolation import linux, namespaces
from workers.sandboxes.isolation.limits import BUSY_S, LimitWatch
from workers.sandboxes.isolation.parent_death_pipe import continue_at_the_end

_SIZE = 128
_STUCK_S = 3.0
"""A step that takes longer counts as blocked. No step takes as long otherwise, even on a busy node."""
_AVOIDED_S = 600.0

RECORD = "sandbox.json"
_IDLE_S = 2.0


class Checkpoint:
    """The current step of the guarded process, in memory shared with its guard, and the steps to skip."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, _SIZE)
        self._avoided: dict[bytes, float] = {}
        self._n = 0

    def at(self, label: str = "") -> bool:
        """Record the next step. Returns False if it must be skipped because it blocked recently."""
        key = label.encode()[: _SIZE - 16]
        if self._avoided.get(key, 0.0) > time.monotonic():
            return False
        self._n += 1
        self._shared[:] = b"%d %b" % (self._n, key) + bytes(_SIZE - len(key) - len(b"%d " % self._n))
        return True

    def seen(self) -> bytes:
        """Return the current step, as bytes that change with each `at`."""
        return self._shared[:]

    def avoid(self, seen: bytes) -> None:
        """Skip this step for `_AVOIDED_S` seconds."""
        self._avoided[seen.partition(b" ")[2].rstrip(b"\0")] = time.monotonic() + _AVOIDED_S


def guarded(work: Callable[[Checkpoint], None]) -> None:
    """Run `work` in a child, and again after each hang, until a child exits. SIGCHLD must be ignored (no wait)."""
    checkpoint = Checkpoint()
    while True:
        child = os.fork()
        if child == 0:
            try:
                linux.die_with_parent(signal.SIGKILL)
                work(checkpoint)
            finally:
                os._exit(0)
        if _ends(child, checkpoint):
            return
        with contextlib.suppress(ProcessLookupError):
            # takes effect when the kernel call returns
            os.kill(child, signal.SIGKILL)


def _ends(child: int, checkpoint: Checkpoint) -> bool:
    """Wait for the child. Returns True if it exited, False if it hung; then its current step is skipped from now on."""
    try:
        descriptor = os.pidfd_open(child)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        before = b""
        while not poll.poll(_STUCK_S * 1000):
            seen = checkpoint.seen()
            if seen == before:
                checkpoint.avoid(seen)
                return False
            before = seen
        return True
    finally:
        os.close(descriptor)


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
            namespaces.renumber({0: null, 1: null, 2: null, 3: lock, 4: lifeline})
            os.chdir("/")
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
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
