"""State of programs in a terminal, as far as the kernel reports it."""

from __future__ import annotations

import os

from workers.sandboxes.shell.terminal import ProgramActivity, doing

NOBODY = 65534


def test_ending_program_is_not_waiting_for_input() -> None:
    """An ordinary user cannot read its state; this does not mean that the program is waiting for input."""
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
