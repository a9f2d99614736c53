"""What is known on a node of a running sandbox: its folder, and the processes that hold it."""

from __future__ import annotations

import json
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

from farm.errors import SandboxError
from farm.settings import settings

# a flag of the kernel, PF_EXITING: the first process of a sandbox stays, ending, until all others are gone
_EXITING = 0x4


def folder_of_all() -> Path:
    """The folder on this node that has one folder for each sandbox."""
    return settings().scratch.absolute() / "sandboxes"


def folder(sandbox_id: str) -> Path:
    """The sandbox's own folder. Raises SandboxError if the id is no plain name."""
    if not sandbox_id or "/" in sandbox_id or sandbox_id.startswith("."):
        raise SandboxError(f"sandbox {sandbox_id!r}: the id must be a plain name")
    return folder_of_all() / sandbox_id


@dataclass(frozen=True, slots=True)
class Process:
    """One process, past and future: a pid is given again, a pid with its start (in clock ticks) is not."""

    pid: int
    started: int

    def alive(self) -> bool:
        """False too for one that is ending, or has ended and is not yet waited for."""
        fields = self._fields()
        return bool(fields) and fields[0] not in "ZX" and not int(fields[6]) & _EXITING

    def _fields(self) -> list[str]:
        """What the kernel tells of it, from its state on; nothing if it is gone."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return []
        return fields if int(fields[19]) == self.started else []

    def end(self, number: int, patience_s: float) -> bool:
        """Send it a signal and wait for its end. Returns whether it ended in time. Blocks."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            # only now, as from here on the descriptor and the pid are of the same process
            if not self._fields():
                return True
            signal.pidfd_send_signal(descriptor, number)
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            return bool(poll.poll(patience_s * 1000))
        except ProcessLookupError:
            return True
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Record:
    """A sandbox as its monitor wrote it down."""

    sandbox_id: str
    kind: str
    monitor: Process
    first: Process
    """Process 1 of the sandbox, by its pid on the host."""

    @classmethod
    def load(cls, path: Path) -> Record | None:
        """The record in a sandbox's folder; None if there is none, or none yet."""
        try:
            known = json.loads((path / "sandbox.json").read_text())
        except FileNotFoundError:
            return None
        monitor = Process(known["monitor_pid"], known["monitor_started"])
        return cls(known["sandbox_id"], known["kind"], monitor, Process(known["pid1"], known["pid1_started"]))
