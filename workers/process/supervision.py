"""The agreement of a worker process and its node's supervisor: name, signals, exit status, and files.

It is a module of its own as the supervisor needs this of a worker, and no more.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypedDict

FINISH: int = signal.SIGRTMIN + 1
"""Begin nothing more, play what has begun to its end, then end."""
HAND_BACK: int = signal.SIGRTMIN + 2
"""Stop what is played, put it back into the queue, then end."""
HAND_BACK_S = 10.0
"""Seconds for the workers to put what they play back into the queue. It takes them one or two."""
EXHAUSTED = 75
"""The exit status of a process that has no threads, descriptors or memory left: EX_TEMPFAIL of sysexits.h."""


_PR_SET_PDEATHSIG = 1


class WorkerStart(TypedDict):
    """The parameters of a new worker: name, width, variables of its environment, and the path of its log or nothing."""

    name: str
    slots: int
    env: Mapping[str, str]
    log: str


def end_with(parent: int) -> None:
    """Have the kernel kill this process, just forked, when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def exit_status(pid: int) -> int | None:
    """Return the exit status of a child of this process, negative for a signal; None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def owner_name(node: str, pool: str, pid: int) -> str:
    """Names a worker process in the leases it holds."""
    return f"{node}/{pool}/{pid}"


def ready_file(scratch: Path, pid: int) -> Path:
    """Return the path of the file that a worker makes once it consumes its queue; its node is not announced before."""
    return scratch / f"ready-{pid}"


@cache
def note_without_sandbox(scratch: Path, data_source: str) -> None:
    """Note for the supervisor that rollouts of a data source need no sandbox, as their handler declares.

    Its node announces that, and they begin with the run stage then. Without room on the disk they go the long way.
    """
    with suppress(OSError), _notes(scratch).open("a") as file:
        file.write(json.dumps(data_source) + "\n")


def noted_without_sandbox(scratch: Path) -> list[str]:
    """Return the data sources that were noted; a line that was cut off is none."""
    try:
        lines = _notes(scratch).read_text().splitlines(keepends=True)
    except OSError:
        return []
    return sorted({json.loads(line) for line in lines if line.endswith('"\n')})


def forget_notes(scratch: Path) -> None:
    """Remove the notes of an earlier supervisor's workers, whose handlers may have been others."""
    _notes(scratch).unlink(missing_ok=True)


def _notes(scratch: Path) -> Path:
    return scratch / "without-sandbox"
