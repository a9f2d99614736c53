"""Processes as targets: found among the descendants of a part of the farm, so that no other process is hit."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from testkit.processes import tree
from workers.sandboxes.isolation.namespaces import started_at
from workers.sandboxes.lifecycle.state import Process


def process(pid: int) -> Process | None:
    """Return the present process with this pid; None if it is gone."""
    try:
        result = Process(pid, started_at(pid))
    except (OSError, IndexError):
        return None
    return result if result.alive() else None


def running(root: int, words: str) -> list[Process]:
    """Return the descendants of a process whose command line contains these words, the nearest first."""
    result = [process(pid) for pid in tree(root) if words in command(pid)]
    return [each for each in result if each is not None]


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def send(target: Process, number: signal.Signals) -> bool:
    """Signal exactly this process; False if it is gone."""
    if not target.alive():
        return False
    target.end(number, 0.0)
    return True
