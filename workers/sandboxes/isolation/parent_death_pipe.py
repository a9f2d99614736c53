"""Signal a process when the other end of a socket or pipe is closed. Standard library only.

Processes started by a worker or node exit when it closes its end. A stopped process (SIGSTOP) would never notice, so
the kernel sends it SIGCONT at that moment. PR_SET_PDEATHSIG cannot replace this: it does not work for orphans, and
monitors must outlive the fork server that forked them.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal


def signal_at_the_end(descriptor: int, number: int, receiver: int) -> None:
    """Send `receiver` the signal `number` when the other end is closed, or when data arrives.

    `receiver` is a pid, or the negative of a process group id; the group can be created later. The setting belongs to
    the open file description, so it also holds for copies of the descriptor in other processes, until the last one is
    closed. The policy must not get a copy: it could choose another signal.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, receiver)
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, number)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)


def continue_at_the_end(descriptor: int, leader: int) -> None:
    """Send SIGCONT to a process group when the other end is closed."""
    signal_at_the_end(descriptor, signal.SIGCONT, -leader)


def wait_for(descriptor: int, requester: int) -> None:
    """Wait until `descriptor` is readable. Raises OSError if the other end of the pipe `requester` is closed first."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(requester, 0)
    if descriptor not in dict(poll.poll()):
        raise OSError("start cancelled: the requesting process has ended")


def opened_again(pipe: int) -> int:
    """Open a pipe's read end again, with signal settings of its own. Works only for the user who created the pipe."""
    return os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_CLOEXEC)
