"""Protect helper processes from a SIGTERM that is sent to all processes of a node. Standard library only.

Slurm and systemd send SIGTERM to every process of a job. It could hit a helper before the helper ignores it. So the
starting thread blocks SIGTERM, which the helper inherits across exec. The helper then ignores the signal, which also
drops a pending one, and unblocks it for its own children.
"""

from __future__ import annotations

import contextlib
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM for processes started within the block, until they call `ignore_sigterm`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_sigterm() -> None:
    """Ignore SIGTERM and unblock it. A helper calls this first."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
