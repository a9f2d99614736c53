"""Ending a command together with all it started, wherever that went: by a mark in the environment.

A process group or session is left by anyone who calls setsid, and a parent's death makes an orphan of its child; the
environment a process began with stays readable until it ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
from pathlib import Path

MARK = "SANDBOX_COMMAND"
_ROUNDS = 20
_PATIENCE_S = 1.0


def new_mark() -> str:
    """The value of an environment variable `MARK` that only one command and its descendants carry."""
    return secrets.token_hex(8)


def carriers(mark: str) -> list[int]:
    """The pids, on the host, of all processes that carry a mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def kill_carriers(mark: str) -> None:
    """SIGKILL to all of them, again until none is left: some may fork meanwhile. Blocks for milliseconds."""
    for _ in range(_ROUNDS):
        pids = carriers(mark)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """The pids of a process's own children; none if it is gone."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def kill_joined(nsenter: int) -> None:
    """SIGKILL to the command that an `nsenter` waits for, so that it ends by itself; to it too if it does not. Blocks.

    In this order, as a command whose `nsenter` dies first is left to the host's first process, and a sandbox cannot end
    before that has waited for it: with some, seconds.
    """
    try:
        descriptor = os.pidfd_open(nsenter)
    except ProcessLookupError:
        return
    try:
        for pid in children(nsenter) or [nsenter]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(_PATIENCE_S * 1000):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)
