"""A signal when the other end of a descriptor is closed, which also what is stopped hears; standard library only.

What a worker or a node starts ends when its end of a socket or pipe is closed. A process that is stopped watches
nothing, and would stay for ever, so the kernel continues it at that moment. Not by the signal that comes with the death
of a parent: that of an orphan does not die, and monitors are to outlive the porter that forked them.
"""

from __future__ import annotations

import fcntl
import os
import signal


def signal_at_the_end(descriptor: int, number: int, receiver: int) -> None:
    """Send a signal when nobody holds the other end of a socket or pipe any more, and whenever something comes from it.

    `receiver` is a pid, or that of a process group's leader, negated; it need not lead it yet. What the descriptor
    stands for keeps it, for its copies in other processes, too, until the last of them is closed. None may be the
    policy's, which could choose another signal.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, receiver)
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, number)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)


def continue_at_the_end(descriptor: int, leader: int) -> None:
    """Let what is stopped of a process group go on when nobody holds the other end of a socket or pipe any more."""
    signal_at_the_end(descriptor, signal.SIGCONT, -leader)


def opened_again(pipe: int) -> int:
    """Another read end of a pipe, whose signals are its own. Only for the user who made the pipe."""
    return os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_CLOEXEC)
