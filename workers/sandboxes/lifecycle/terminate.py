"""The termination of sandboxes of this node, as many as there are side by side, however few of them respond.

A process that sleeps in the kernel, on a dead disk say, is not ended by SIGKILL until it wakes. Then it is gone at
once, and with it all that its sandbox had mounted. So it is waited for briefly, once, and its folder removed all the
same; it writes nothing any more.
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
"""For a monitor to end what it holds; a busy node needs some of it."""
KILL_S = 1.0
"""Seconds after SIGKILL: a process that has not ended by then sleeps in the kernel."""
REMOVE_S = 20.0

_asleep: set[Process] = set()
"""Waited for in vain."""


def terminate(record: SandboxRecord) -> None:
    """Let the monitor end the sandbox, or end it without one; harmless if repeated. Blocks."""
    terminate_all([record])


def terminate_all(records: Collection[SandboxRecord], patience_s: float = STOP_S) -> list[Path]:
    """As `end`, of many at a time: as long as for one. Their folders, as far as they are gone now. Blocks."""
    for record in records:
        # at once, and not when its monitor comes to it
        _signal_termination(record.first)
    deaf = end_together((record.monitor for record in records), END, patience_s)
    asleep = _kill([*deaf, *(record.first for record in records)])
    gone = []
    for record in records:
        record.monitor.kill_group()
        # where a process sleeps it cannot be removed now; a later sweep does
        cgroups.remove(record.cgroup, 0.0 if record.first in asleep else cgroups.WAIT_TIMEOUT_S)
        state = record.folder
        sandbox_record = SandboxRecord.load(state)
        # a sandbox of the same id that was started since is not to be removed
        if sandbox_record in (None, record) and remove(state, REMOVE_S):
            gone.append(state)
    return gone


def terminate_in(states: Iterable[Path], patience_s: float = STOP_S) -> list[Path]:
    """End the sandboxes of these folders, and remove them; returns those that are gone. Blocks.

    A start that hangs, and will not be killed, keeps its folder.
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
    # another user's is its monitor's to kill
    with contextlib.suppress(PermissionError):
        if (descriptor := process.signalled(signal.SIGKILL)) is not None:
            os.close(descriptor)


def _kill(processes: Iterable[Process]) -> set[Process]:
    """Send SIGKILL; returns those that do not end. One that did not the last time is not waited for again."""
    global _asleep
    processes = list(processes)
    known = end_together((each for each in processes if each in _asleep), signal.SIGKILL, 0.0)
    result = known | end_together((each for each in processes if each not in known), signal.SIGKILL, KILL_S)
    _asleep = {each for each in _asleep if each in result or each.there()} | result
    return result
