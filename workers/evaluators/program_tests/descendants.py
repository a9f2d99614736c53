"""Descendants of a process that runs a policy's program: adopted, measured and ended, even if they detach.

Part of programs that are sent into sandboxes as text; standard library only, for Python 3.7 or newer.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from pathlib import Path

_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
POLL_S = 0.001
_ENDING_S = 10.0
"""Among many computing processes, it takes seconds until each gets the CPU time to exit."""


def adopt_descendants() -> bool:
    """Become the parent of every orphaned descendant, and untraceable for them; False if refused."""
    libc = ctypes.CDLL(None)
    return not (libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) or libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def end_descendants() -> bool:
    """Kill descendants until none is left: the children of ended ones become this process's own."""
    deadline = time.monotonic() + _ENDING_S
    while time.monotonic() < deadline:
        for pid in child_pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        time.sleep(POLL_S)
    return False


def descendants_cpu_s() -> float:
    """Return the CPU seconds of all reaped descendants: of all, once they have been ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def child_pids() -> list[int]:
    own_pid = os.getpid()
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == own_pid:
                pids.append(int(entry.name))
    return pids


def runnable_wait_s(pid: int) -> float:
    """Return the seconds for which a process was runnable but got no CPU; 0 if the kernel does not count them."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
