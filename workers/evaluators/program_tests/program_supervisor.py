"""Runs one command in a test sandbox as a program for a limited time, and leaves no process of it behind.

Whatever the command starts has this process as its ancestor, also what detaches itself: it is the subreaper. After the
command has ended, all of that is killed. What cannot be, and whether a program that was out of time computed, waited
for a processor or slept, is told by exit codes that a command's own never are. The command cannot trace this process,
which knows nothing of the test but its input, and passes that on unread.

`python3 -I -c SOURCE SECONDS COMMAND...`, with the Python of a sandbox (3.8 or newer); standard library only.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

LEFT_BEHIND = 121
"""Processes of the command could not be ended."""
COMPUTED, WAITED, SLEPT = 122, 123, 124
"""It was out of time: it had computed for half of it, else waited for a processor for a quarter of it, else neither."""
_OWN_CODES = (LEFT_BEHIND, COMPUTED, WAITED, SLEPT)
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_KILLING_S = 5.0


class OutOfTime(Exception):
    """The time of the command is over."""


def main(limit_s: float, command: list[str]) -> None:
    libc = ctypes.CDLL(None)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) or libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
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
    waited_s = sum(map(_waited_s, _children()))
    if not _killed_all():
        os._exit(LEFT_BEHIND)
    if status < 0:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        computed = used.ru_utime + used.ru_stime >= limit_s / 2
        os._exit(COMPUTED if computed else WAITED if waited_s >= limit_s / 4 else SLEPT)
    code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    os._exit(1 if code in _OWN_CODES else code)


def _late(*_: Any) -> None:
    raise OutOfTime


def _killed_all() -> bool:
    """Kill descendants until none is left: the children of those that end become this process's own."""
    deadline = time.monotonic() + _KILLING_S
    while time.monotonic() < deadline:
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        time.sleep(0.001)
    return False


def _children() -> list[int]:
    me = os.getpid()
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == me:
                result.append(int(entry.name))
    return result


def _waited_s(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
