"""A signal when the other end of a descriptor is closed, which also a stopped process gets; standard library only.

What a worker or a node starts ends when its end of a socket or pipe is closed. A process that is stopped watches
nothing, and would stay for ever, so the kernel continues it at that moment. Not by the signal that comes with the end
of a parent: that of an orphan does not end, and monitors are to outlive the fork server that forked them.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal


def signal_at_the_end(descriptor: int, number: int, receiver: int) -> None:
    """Send a signal when the other end of a socket or pipe is closed, and whenever something comes from it.

    `receiver` is a pid, or that of a process group's leader, negated; it need not lead it yet. What the descriptor
    stands for keeps it, for its copies in other processes, too, until the last of them is closed. None may be the
    policy's, which could choose another signal.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, receiver)
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, number)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)


def continue_at_the_end(descriptor: int, leader: int) -> None:
    """Continue the stopped processes of a group when the other end of a socket or pipe is closed."""
    signal_at_the_end(descriptor, signal.SIGCONT, -leader)


def wait_for(descriptor: int, wanted: int) -> None:
    """Until there is something to read. Raises OSError if the other end of the pipe `wanted` is closed before."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(wanted, 0)
    if descriptor not in dict(poll.poll()):
        raise OSError("nobody waits for it any more")


def opened_again(pipe: int) -> int:
    """Another read end of a pipe, whose signals are its own. Only for the user who made the pipe."""
    return os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_CLOEXEC)
