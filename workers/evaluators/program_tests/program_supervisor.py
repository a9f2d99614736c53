"""Runs one command in a test sandbox as a program for a limited time, and leaves no process of it behind.

All processes of the command are descendants of this process, even if they detach. After the command has ended, they are
killed. Special exit codes, which a command itself never has, report processes that cannot be killed, and whether a
program that timed out computed, waited for a CPU or slept. A signal is reported as by a shell, as 128 plus its number,
which is never a command's own code either. The command cannot trace this process, which knows only the test's input and
passes it on unread.

`python3 -I -c SOURCE SECONDS CPU_SECONDS COMMAND...`, with the Python of a sandbox (3.8 or newer), after the source of
`descendants.py`; standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from workers.evaluators.program_tests.descendants import (
    adopt_descendants,
    child_pids,
    descendants_cpu_s,
    end_descendants,
    runnable_wait_s,
)

LEFT_BEHIND = 121
"""Processes of the command could not be killed."""
COMPUTED, WAITED, SLEPT = 122, 123, 124
"""It timed out: its processes had used their CPU time; or it had waited for a CPU for a quarter of its time; or
neither."""
_OWN_CODES = (LEFT_BEHIND, COMPUTED, WAITED, SLEPT)


class OutOfTime(Exception):
    """The time of the command is over."""


def main(limit_s: float, cpu_s: float, command: list[str]) -> None:
    if not adopt_descendants():
        sys.exit("this process can be traced, or cannot reap")
    signal.signal(signal.SIGALRM, _late)
    child = os.posix_spawnp(command[0], command, os.environ)
    status = -1
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        _, status = os.waitpid(child, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except OutOfTime:
        pass
    waited_s = sum(map(runnable_wait_s, child_pids()))
    if not end_descendants():
        os._exit(LEFT_BEHIND)
    if status < 0:
        computed = descendants_cpu_s() >= cpu_s
        os._exit(COMPUTED if computed else WAITED if waited_s >= limit_s / 4 else SLEPT)
    if os.WIFSIGNALED(status):
        os._exit(128 + os.WTERMSIG(status))
    code = os.WEXITSTATUS(status)
    os._exit(1 if code in _OWN_CODES or code > 128 else code)


def _late(*_: Any) -> None:
    raise OutOfTime


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
