"""Starting a helper so that a SIGTERM to all processes of a node does not end it; standard library only.

Slurm and systemd send it to every process of a job. A helper that is being started would be ended by it before it could
ignore it. So the signal is blocked in the thread that starts the helper, which inherits that over its exec; a
helper ignores it, which drops one that has come meanwhile, then lets it through again for what it starts itself.
"""

from __future__ import annotations

import contextlib
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM for what is started in the block, until it calls `ignore_sigterm`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_sigterm() -> None:
    """In a helper, as soon as it runs."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
