"""What programs in a terminal do, as far as the kernel tells."""

from __future__ import annotations

import os

from workers.sandboxes.waiting import Doing, doing

NOBODY = 65534


def test_one_that_ends_waits_for_nothing() -> None:
    """An ordinary user is not told what it does; that is no silence of a program that may be asking."""
    asks = os.fork()
    if asks == 0:
        found = Doing.READING
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            ends = os.fork()
            if ends == 0:
                os.setpgid(0, 0)
                os._exit(0)
            os.waitid(os.P_PID, ends, os.WEXITED | os.WNOWAIT)
            found = doing(os.getpid(), ends, "/dev/pts/0")
        finally:
            os._exit(found)
    assert os.waitstatus_to_exitcode(os.waitpid(asks, 0)[1]) == Doing.BUSY
