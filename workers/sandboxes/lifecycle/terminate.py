"""Termination of sandboxes of this node, many in parallel, even if some of them do not respond.

A process in an uninterruptible sleep, e.g. on a dead disk, ends only when it wakes up after SIGKILL. It then disappears
immediately, with all mounts of its sandbox, and writes nothing any more. So it is waited for only briefly and only
once, and its folder is removed nevertheless.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterable
from pathlib import Path

from workers.sandboxes import cgroups
from workers.sandboxes.isolation.monitor import END
from workers.sandboxes.lifecycle.state import Process, SandboxRecord, end_together, starter
from workers.sandboxes.remove_tree import remove

STOP_S = 5.0
"""Time for a monitor to end its sandbox. A busy node needs some of it."""
KILL_S = 1.0
"""Time to wait after SIGKILL. A process that has not ended by then is in an uninterruptible sleep."""
REMOVE_S = 20.0

_asleep: set[Process] = set()
"""Processes that did not end after SIGKILL."""


def terminate(record: SandboxRecord) -> None:
    """End a sandbox through its monitor, or without if the monitor is dead; harmless if repeated. Blocks."""
    terminate_all([record])


def terminate_all(records: Collection[SandboxRecord], patience_s: float = STOP_S) -> list[Path]:
    """End many sandboxes in the time of one. Returns the folders that are gone now. Blocks."""
    for record in records:
        # immediately, before the monitor gets to it
        _signal_termination(record.first)
    deaf = end_together((record.monitor for record in records), END, patience_s)
    asleep = _kill([*deaf, *(record.first for record in records)])
    gone = []
    for record in records:
        record.monitor.kill_group()
        # fails while a process sleeps in it; a later sweep removes it
        cgroups.remove(record.cgroup, 0.0 if record.first in asleep else cgroups.WAIT_TIMEOUT_S)
        state = record.folder
        sandbox_record = SandboxRecord.load(state)
        # a new sandbox with the same id must not be removed
        if sandbox_record in (None, record) and remove(state, REMOVE_S):
            gone.append(state)
    return gone


def terminate_in(states: Iterable[Path], patience_s: float = STOP_S) -> list[Path]:
    """End the sandboxes of these folders and remove them; returns those that are gone. Blocks.

    A start that hangs and cannot be killed keeps its folder.
    """
    records, others, hanging = [], [], {}
    for state in states:
        if record := SandboxRecord.load(state):
            records.append(record)
        elif starting := starter(state):
            hanging[state] = starting
        else:
            others.append(state)
    gone = terminate_all(records, patience_s)
    asleep = _kill(hanging.values())
    for starting in hanging.values():
        starting.kill_group()
    others += [state for state, starting in hanging.items() if starting not in asleep]
    return gone + [state for state in others if remove(state, REMOVE_S)]


def _signal_termination(process: Process) -> None:
    # the monitor kills processes of another user
    with contextlib.suppress(PermissionError):
        if (descriptor := process.signalled(signal.SIGKILL)) is not None:
            os.close(descriptor)


def _kill(processes: Iterable[Process]) -> set[Process]:
    """Send SIGKILL. Returns the processes that did not end. Those that did not end the last time are not waited for."""
    global _asleep
    processes = list(processes)
    known = end_together((each for each in processes if each in _asleep), signal.SIGKILL, 0.0)
    result = known | end_together((each for each in processes if each not in known), signal.SIGKILL, KILL_S)
    _asleep = {each for each in _asleep if each in result or each.there()} | result
    return result
