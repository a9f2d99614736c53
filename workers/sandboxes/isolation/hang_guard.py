"""Run work that can block in the kernel in a child process, and restart it without the step that blocked.

Reading /proc files of a process (open files, memory, since about Linux 6.16 also its state) takes locks that a process
blocked on a dead disk can hold. There is no way to know in advance, and a thread cannot be killed. Standard library
only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import time

from workers.sandboxes.isolation import linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_SIZE = 128
_STUCK_S = 3.0
"""A step that takes longer counts as blocked. No step takes as long otherwise, even on a busy node."""
_AVOIDED_S = 600.0


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
