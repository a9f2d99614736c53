"""Mutual exclusion across processes, and nodes on a shared file system: a lock file that no dead holder can keep.

The kernel releases a lock when its process ends. A network file server may not, if the whole node is gone. So a holder
updates the file's time as a heartbeat, and if that stops, a waiting process continues without the lock. Therefore, work
under the lock must be correct even if two processes do it at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BEAT_S = 10.0
"""Seconds between the heartbeats of a holder."""
DEAD_S = 120.0
"""Seconds without a heartbeat after which a holder counts as dead."""
_POLL_S = (0.01, 0.5)

# Lustre and others may be mounted without locks
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


@contextmanager
def exclusive(path: Path, dead_s: float = DEAD_S) -> Iterator[bool]:
    """Hold the lock file while the block runs; yield whether it is held. Blocks.

    Yields False, without the lock, if its holder is dead or the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, held = _take(path, dead_s)
    done = threading.Event()
    heartbeat = threading.Thread(target=_show_life, args=(descriptor, done), name="lock", daemon=True)
    heartbeat.start()
    try:
        yield held
    finally:
        done.set()
        heartbeat.join()
        os.close(descriptor)


@contextmanager
def if_free(path: Path, *, without_locks: bool = False) -> Iterator[bool]:
    """Hold an existing lock file while the block runs, if it is free; yield whether it is held. Does not wait.

    Yields `without_locks` if the file system has no locks. Raises FileNotFoundError if there is no such file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield _held_now(descriptor, path, without_locks)
    finally:
        os.close(descriptor)


@contextmanager
def shared(path: Path) -> Iterator[int]:
    """Hold a shared lock until the block has ended and no process has the descriptor any more.

    Raises FileNotFoundError if there is no such file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _flock(descriptor, fcntl.LOCK_SH)
        if not _is_at(descriptor, path):
            raise FileNotFoundError(path)
        yield descriptor
    finally:
        os.close(descriptor)


def _held_now(descriptor: int, path: Path, without_locks: bool) -> bool:
    try:
        return without_locks if not _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB) else _is_at(descriptor, path)
    except BlockingIOError:
        return False


def _take(path: Path, dead_s: float) -> tuple[int, bool]:
    seen, since, pause_s = 0, time.monotonic(), _POLL_S[0]
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            if not _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                return descriptor, False
            # its last holder may have deleted the file, so that another one has the name now
            if _is_at(descriptor, path):
                os.utime(descriptor)
                return descriptor, True
        except BlockingIOError:
            pass
        except OSError:
            os.close(descriptor)
            raise
        touched_at = os.fstat(descriptor).st_mtime_ns
        if touched_at != seen:
            seen, since = touched_at, time.monotonic()
        elif time.monotonic() - since > dead_s:
            return descriptor, False
        os.close(descriptor)
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _POLL_S[1])


def _flock(descriptor: int, operation: int) -> bool:
    """Lock it; return False if the file system has no locks. Raises BlockingIOError if it must not wait."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), stat)


def _show_life(descriptor: int, done: threading.Event) -> None:
    while not done.wait(BEAT_S):
        os.utime(descriptor)
