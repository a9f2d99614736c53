"""State of programs in a terminal, as far as the kernel reports it."""

from __future__ import annotations

import os

from workers.sandboxes.shell.waiting_programs import ProgramActivity, doing

NOBODY = 65534


def test_one_that_ends_waits_for_nothing() -> None:
    """An ordinary user cannot see its state; that is no silence of a program that may await input."""
    asks = os.fork()
    if asks == 0:
        program_activity = ProgramActivity.READING
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
            program_activity = doing(os.getpid(), ends, "/dev/pts/0")
        finally:
            os._exit(program_activity)
    assert os.waitstatus_to_exitcode(os.waitpid(asks, 0)[1]) == ProgramActivity.BUSY
