"""Ending a command together with all it started, wherever that went: by a mark in the environment.

A process group or session is left by anyone who calls setsid, and a parent's death makes an orphan of its child; the
environment a process began with stays readable until it ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from pathlib import Path

MARK = "SANDBOX_COMMAND"
_ROUNDS = 20
_EXEC_S = 0.002


def new_mark() -> str:
    """The value of an environment variable `MARK` that only one command and its descendants carry."""
    return secrets.token_hex(8)


def carriers(mark: str) -> list[int]:
    """The pids, on the host, of all processes that carry a mark."""
    return _seen(mark)[0]


def _seen(mark: str) -> tuple[list[int], bool]:
    """The carriers, and whether there are processes that cannot tell just now."""
    wanted = f"{MARK}={mark}".encode()
    found, unclear = [], False
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                environment = Path(entry.path, "environ").read_bytes()
                if wanted in environment.split(b"\0"):
                    found.append(int(entry.name))
                elif not environment and _is_in_exec(entry.path):
                    unclear = True
    return found, unclear


def _is_in_exec(process: str) -> bool:
    """Whether it is becoming another program: for a moment it has no arguments and no environment, but a program.

    The kernel's own threads, and those that have ended, have none.
    """
    return bool(Path(process, "exe").readlink()) and not Path(process, "cmdline").read_bytes()


def kill_carriers(mark: str) -> None:
    """SIGKILL to all of them, again until none is left: some may fork meanwhile. Blocks for milliseconds."""
    n_empty = 0
    for _ in range(_ROUNDS):
        pids, unclear = _seen(mark)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if unclear:
            time.sleep(_EXEC_S)
        # twice, as one that forked and ended while we looked was not seen, nor was its child
        n_empty = 0 if pids or unclear else n_empty + 1
        if n_empty == 2:
            return


def children(pid: int) -> list[int]:
    """The pids of a process's own children; none if it is gone."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
