"""The state of a running sandbox on its node, its folder and its processes; and its termination.

Many sandboxes end in parallel, even if some of them do not respond. A process in an uninterruptible sleep, e.g. on a
dead disk, ends only when it wakes up after SIGKILL. It then disappears immediately, with all mounts of its sandbox, and
writes nothing any more. So it is waited for only briefly and only once, and its folder is removed nevertheless.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from farm.errors import SandboxError
from workers.config import SandboxConfig
from workers.sandboxes import cgroups
from workers.sandboxes.isolation.monitor import END
from workers.sandboxes.remove_tree import remove

_LONGEST = 200
"""Maximum length of an id in bytes. A file name has at most 255, and some names consist of an id and a suffix."""
# kernel flag PF_EXITING: the first process of a sandbox stays, exiting, until all others are gone
_EXITING = 0x4

STOP_S = 5.0
"""Time for a monitor to end its sandbox. A busy node needs some of it."""
KILL_S = 1.0
"""Time to wait after SIGKILL. A process that has not ended by then is in an uninterruptible sleep."""
REMOVE_S = 20.0

_unkillable: set[Process] = set()
"""Processes that did not end after SIGKILL."""


def folder(config: SandboxConfig, sandbox_id: str) -> Path:
    """Return the folder of a sandbox. Raises SandboxError if the id is not a plain name."""
    plain = sandbox_id.isprintable() and "/" not in sandbox_id and len(os.fsencode(sandbox_id)) <= _LONGEST
    if not plain or not sandbox_id or sandbox_id.startswith("."):
        raise SandboxError(f"sandbox {sandbox_id!r}: the id must be a plain name")
    return config.sandboxes_folder / sandbox_id


@dataclass(frozen=True, slots=True)
class Process:
    """One process, identified by pid and start time (in clock ticks), because pids are reused."""

    pid: int
    started: int

    def alive(self) -> bool:
        """Return whether it runs; False also for a process that is exiting or a zombie."""
        fields = self._fields()
        return bool(fields) and fields[0] not in "ZX" and not int(fields[6]) & _EXITING

    def _fields(self) -> list[str]:
        """Return the fields of its /proc stat, from the state on; empty if it is gone."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return []
        return fields if int(fields[19]) == self.started else []

    def remains(self) -> bool:
        """Return whether any trace of it is left, such as a zombie."""
        return bool(self._fields())

    def end(self, number: int, patience_s: float) -> bool:
        """Send it a signal and wait for its end. Returns whether it ended in time. Blocks."""
        return not end_together([self], number, patience_s)

    def kill_group(self) -> None:
        """Kill the process group that it leads or has led. Stopped processes in it would otherwise stay for ever."""
        if self.remains() or not Path(f"/proc/{self.pid}").exists():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def signalled(self, number: int) -> int | None:
        """Send it a signal. Returns a pidfd to wait for its end, or None if it has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        try:
            # checked after opening: from here on, the descriptor and the pid refer to the same process
            if self._fields():
                signal.pidfd_send_signal(descriptor, number)
                return descriptor
        except ProcessLookupError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None


_TOGETHER = 200
"""Processes that are waited for at a time; a process can have only 1024 descriptors."""


def end_together(processes: Iterable[Process], number: int, patience_s: float) -> set[Process]:
    """Signal all and wait for their ends with one common time limit. Returns those that did not end in time. Blocks."""
    rest, left = iter(processes), set()
    while some := list(islice(rest, _TOGETHER)):
        left |= _end_some(some, number, patience_s)
    return left


def _end_some(processes: Iterable[Process], number: int, patience_s: float) -> set[Process]:
    descriptors: dict[int, Process] = {}
    poll = select.poll()
    try:
        for process in processes:
            if (descriptor := process.signalled(number)) is not None:
                descriptors[descriptor] = process
                poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + patience_s
        while descriptors and (ended := poll.poll(max(0.0, deadline - time.monotonic()) * 1000)):
            for descriptor, _ in ended:
                poll.unregister(descriptor)
                os.close(descriptor)
                del descriptors[descriptor]
        return set(descriptors.values())
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def is_locked(state: Path) -> bool:
    """Return whether a process starts or holds the sandbox of this folder. The lock ends with its last holder."""
    try:
        with (state / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    return False


def starter(state: Path) -> Process | None:
    """Return the monitor, which writes its identity into the lock when it starts; None if it has not yet."""
    try:
        pid, started = (state / "lock").read_text().split()
        return Process(int(pid), int(started))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class SandboxRecord:
    """A sandbox as recorded by its monitor. Its id is its folder's name, which changes when it leaves the warm pool."""

    folder: Path
    kind: str
    monitor: Process
    first: Process
    """Process 1 of the sandbox, by its pid on the host."""
    cgroup: str = ""
    """The folder of its control group; empty if it has none."""

    @property
    def sandbox_id(self) -> str:
        return self.folder.name

    @classmethod
    def load(cls, path: Path) -> SandboxRecord | None:
        """Return the record in a sandbox's folder; None if there is none yet, or only a part after a power failure."""
        try:
            known = json.loads((path / "sandbox.json").read_text())
            monitor = Process(known["monitor_pid"], known["monitor_started"])
            first = Process(known["pid1"], known["pid1_started"])
            return cls(path, known["kind"], monitor, first, cgroups.of(path))
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return None


def terminate(record: SandboxRecord) -> None:
    """End a sandbox through its monitor, or without if the monitor is dead; harmless if repeated. Blocks."""
    terminate_all([record])


def terminate_all(records: Collection[SandboxRecord], patience_s: float = STOP_S) -> list[Path]:
    """End many sandboxes in the time of one. Returns the folders that are gone now. Blocks."""
    for record in records:
        # immediately, before the monitor gets to it
        # the monitor kills processes of another user
        with contextlib.suppress(PermissionError):
            if (descriptor := record.first.signalled(signal.SIGKILL)) is not None:
                os.close(descriptor)
    unresponsive = end_together((record.monitor for record in records), END, patience_s)
    unkillable = _kill([*unresponsive, *(record.first for record in records)])
    gone = []
    for record in records:
        record.monitor.kill_group()
        # fails while a process sleeps in it; a later sweep removes it
        cgroups.remove(record.cgroup, 0.0 if record.first in unkillable else cgroups.WAIT_TIMEOUT_S)
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
    unkillable = _kill(hanging.values())
    for starting in hanging.values():
        starting.kill_group()
    others += [state for state, starting in hanging.items() if starting not in unkillable]
    return gone + [state for state in others if remove(state, REMOVE_S)]


def _kill(processes: Iterable[Process]) -> set[Process]:
    """Send SIGKILL. Returns the processes that did not end. Those that did not end the last time are not waited for."""
    global _unkillable
    processes = list(processes)
    known = end_together((each for each in processes if each in _unkillable), signal.SIGKILL, 0.0)
    survivors = known | end_together((each for each in processes if each not in known), signal.SIGKILL, KILL_S)
    _unkillable = {each for each in _unkillable if each in survivors or each.remains()} | survivors
    return survivors
