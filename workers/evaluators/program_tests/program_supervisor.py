"""Runs one command in a test sandbox as a program for a limited time, and leaves no process of it behind.

Whatever the command starts has this process as its ancestor, also what detaches itself. After the command has ended,
all of that is killed. What cannot be, and whether a program that was out of time computed, waited for a processor or
slept, is told by exit codes that a command's own never are. A signal is told as a shell does, by 128 and its number,
which is no code of a command's own either. The command cannot trace this process, which knows nothing of the test but
its input, and passes that on unread.

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
"""Processes of the command could not be ended."""
COMPUTED, WAITED, SLEPT = 122, 123, 124
"""It was out of time: all its processes had computed for its CPU time, else it waited for a processor for a quarter of
its time, else neither."""
_OWN_CODES = (LEFT_BEHIND, COMPUTED, WAITED, SLEPT)


class OutOfTime(Exception):
    """The time of the command is over."""


def main(limit_s: float, cpu_s: float, command: list[str]) -> None:
    if not adopt_descendants():
        sys.exit("this process cannot be kept from being traced, or cannot reap")
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
