"""The interface between a worker process and its node's supervisor: name, signals, exit status, and files.

It is a separate module because the supervisor needs nothing else of a worker.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypedDict

FINISH: int = signal.SIGRTMIN + 1
"""Start nothing more, finish the running stages, then exit."""
HAND_BACK: int = signal.SIGRTMIN + 2
"""Stop the running stages, requeue them, then exit."""
HAND_BACK_S = 10.0
"""Time for the workers to requeue their stages, which takes them one or two seconds."""
EXHAUSTED = 75
"""The exit status of a process that has no threads, descriptors or memory left: EX_TEMPFAIL of sysexits.h."""


class WorkerStart(TypedDict):
    """The parameters of a new worker: name, width, environment variables, and the path of its log or an empty text."""

    name: str
    slots: int
    env: Mapping[str, str]
    log: str


def exit_status(pid: int) -> int | None:
    """Return the exit status of a child of this process, negative for a signal; None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def owner_name(node: str, pool: str, pid: int) -> str:
    """Return the name of a worker process in the leases it holds."""
    return f"{node}/{pool}/{pid}"


def ready_file(scratch: Path, pid: int) -> Path:
    """Return the path of the file that a worker creates when it consumes its queue. Then its node is announced."""
    return scratch / f"ready-{pid}"


@cache
def note_without_sandbox(scratch: Path, data_source: str) -> None:
    """Tell the supervisor that rollouts of a data source need no sandbox, as declared by their handler.

    Its node announces that, and such rollouts then begin with the run stage. If the disk is full, they begin with init.
    """
    with suppress(OSError), _notes(scratch).open("a") as file:
        file.write(json.dumps(data_source) + "\n")


def noted_without_sandbox(scratch: Path) -> list[str]:
    """Return the noted data sources; an incomplete line is ignored."""
    try:
        lines = _notes(scratch).read_text().splitlines(keepends=True)
    except OSError:
        return []
    return sorted({json.loads(line) for line in lines if line.endswith('"\n')})


def forget_notes(scratch: Path) -> None:
    """Remove the notes of an earlier supervisor's workers, whose handlers may have been different."""
    _notes(scratch).unlink(missing_ok=True)


def _notes(scratch: Path) -> Path:
    return scratch / "without-sandbox"
