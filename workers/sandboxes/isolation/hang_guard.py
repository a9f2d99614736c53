"""A process that may block in the kernel, and its guard, which restarts it without the step that it blocked at.

Reading of a process in /proc may wait for locks, which one that sleeps on a dead disk may hold: its open files,
its memory, since Linux 6.16 or so even its state. Nothing shows that beforehand, and a thread cannot be ended. Standard
library only.
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
"""Longer than anything takes that does not sleep, on a busy node too."""
_AVOIDED_S = 600.0


class Checkpoint:
    """The current step of the guarded process, in memory that its guard sees, and the steps that it is to skip."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, _SIZE)
        self._avoided: dict[bytes, float] = {}
        self._n = 0

    def at(self, what: str = "") -> bool:
        """Note the next step; returns False if it is to be skipped, as it got no answer a while ago."""
        label = what.encode()[: _SIZE - 16]
        if self._avoided.get(label, 0.0) > time.monotonic():
            return False
        self._n += 1
        self._shared[:] = b"%d %b" % (self._n, label) + bytes(_SIZE - len(label) - len(b"%d " % self._n))
        return True

    def seen(self) -> bytes:
        """Return the current step, which changes with each `at`."""
        return self._shared[:]

    def avoid(self, seen: bytes) -> None:
        """Skip that step from now on."""
        self._avoided[seen.partition(b" ")[2].rstrip(b"\0")] = time.monotonic() + _AVOIDED_S


def guarded(work: Callable[[Checkpoint], None]) -> None:
    """Call it in a child, again until one ends by itself. SIGCHLD is to be ignored: the children are not waited for."""
    place = Checkpoint()
    while True:
        child = os.fork()
        if child == 0:
            try:
                linux.die_with_parent(signal.SIGKILL)
                work(place)
            finally:
                os._exit(0)
        if _ends(child, place):
            return
        with contextlib.suppress(ProcessLookupError):
            # it ends now, or when the kernel lets it go
            os.kill(child, signal.SIGKILL)


def _ends(child: int, place: Checkpoint) -> bool:
    """Wait until it has ended, or does nothing any more."""
    try:
        descriptor = os.pidfd_open(child)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        before = b""
        while not poll.poll(_STUCK_S * 1000):
            seen = place.seen()
            if seen == before:
                place.avoid(seen)
                return False
            before = seen
        return True
    finally:
        os.close(descriptor)
