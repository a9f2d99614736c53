"""Kill a command with all its descendants, found by a mark in their environment.

A process can leave its group and session by setsid, and becomes an orphan when its parent ends. But the environment
with which a process started can be read until it ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

MARK = "SANDBOX_COMMAND"
_ROUNDS = 20
_EXEC_S = 0.002
_ENDS_S = 10.0
"""Time in which a killed process gets a CPU and ends, even on a busy machine."""
_POLL_S = 0.02
_SILENT_S = 1.0
"""Time without progress. Reading a process takes microseconds, unless it is in an uninterruptible sleep."""


def new_tag() -> str:
    """Return a value for the environment variable `MARK` that only one command and its descendants carry."""
    return secrets.token_hex(8)


def tagged_processes(mark: str) -> list[int]:
    """Return the host pids of all processes that carry a mark."""
    return _seen(mark)[0]


def _seen(mark: str, lineage: Lineage | None = None) -> tuple[list[int], bool]:
    """Return the carriers, and whether some processes cannot be read at the moment."""
    while True:
        if lineage is None:
            pids, unclear = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()], False
        else:
            pids, unclear = lineage.processes()
        if not pids:
            return [], unclear
        search = _Search(f"{MARK}={mark}".encode(), pids)
        if search.comes_to_its_end():
            return search.carriers, search.unclear or unclear


@dataclass(frozen=True, slots=True)
class Lineage:
    """A command's `leader`, which started with the mark, and the `reaper` that adopts its orphans."""

    leader: int
    reaper: int

    def processes(self) -> tuple[list[int], bool]:
        """Return the leader and all descendants of both, and whether one ended meanwhile, orphaning its children."""
        pids = [*([self.leader] if _exists(self.leader) else []), *_below(self.reaper)]
        ended = False
        for pid in pids:
            value = _below(pid)
            ended = ended or not (value or _exists(pid))
            pids += value
        return pids, ended


def _exists(pid: int) -> bool:
    return Path("/proc", str(pid)).exists()


def _below(pid: int) -> list[int]:
    folder = f"/proc/{pid}/task"
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(folder):  # noqa: PTH208 - it is called for each sandbox that ends
            with contextlib.suppress(OSError), open(f"{folder}/{thread}/children") as file:  # noqa: PTH123
                pids += map(int, file.read().split())
    return pids


class _Search:
    """A search for carriers in its own thread, because reading a process in an uninterruptible sleep can block.

    Later searches skip such a process until it has answered. It was signalled to end, or will be with its sandbox.
    """

    _lock = threading.Lock()
    _silent: ClassVar[set[int]] = set()

    def __init__(self, wanted: bytes, pids: Sequence[int]) -> None:
        self.carriers: list[int] = []
        self.unclear = False
        self._wanted = wanted
        self._pids = pids
        self._pid = self._n = 0
        self._given_up = False
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="carriers", daemon=True).start()

    def comes_to_its_end(self) -> bool:
        n_before = -1
        while not self._ended.wait(_SILENT_S):
            with self._lock:
                if self._n == n_before:
                    self._given_up = True
                    self._silent.add(self._pid)
                    return False
                n_before = self._n
        return True

    def _run(self) -> None:
        for pid in self._pids:
            with self._lock:
                if self._given_up:
                    self._silent.discard(self._pid)
                    return
                self._pid = pid
                self._n += 1
                if pid in self._silent:
                    continue
            self._ask(pid)
        with self._lock:
            if self._given_up:
                self._silent.discard(self._pid)
        self._ended.set()

    def _ask(self, pid: int) -> None:
        process = f"/proc/{pid}"
        with contextlib.suppress(OSError):
            environment = Path(process, "environ").read_bytes()
            if self._wanted in environment.split(b"\0"):
                self.carriers.append(pid)
            elif not environment and _is_in_exec(process):
                self.unclear = True


def _is_in_exec(process: str) -> bool:
    """Return whether a process is in the middle of an exec: for a moment it has no arguments or environment.

    Kernel threads and zombies, in contrast, have no program either.
    """
    return bool(Path(process, "exe").readlink()) and not Path(process, "cmdline").read_bytes()


def kill_tagged(mark: str, lineage: Lineage | None = None) -> None:
    """Kill all carriers by SIGKILL, repeatedly, because some may fork meanwhile. Blocks for milliseconds.

    With a `lineage`, only its processes are searched, which are far fewer than all of the node.
    """
    signalled: set[int] = set()
    n_empty = 0
    for _ in range(_ROUNDS):
        pids, unclear = _seen(mark, lineage)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if unclear:
            time.sleep(_EXEC_S)
        # a signalled process forks no more, and ends when it gets a CPU
        n_empty = n_empty + 1 if signalled.issuperset(pids) and not unclear else 0
        signalled.update(pids)
        # twice, because a process that forked and ended during the search was missed, as was its child
        if n_empty == 2:
            break
    _await_ends(mark, signalled)


def _await_ends(mark: str, signalled: set[int]) -> None:
    """Wait until these have ended, except those in an uninterruptible sleep. On a busy machine this takes time."""
    until = time.monotonic() + _ENDS_S
    pause_s = _EXEC_S / 4
    pids = [*signalled]
    while pids and time.monotonic() < until:
        search = _Search(f"{MARK}={mark}".encode(), pids)
        if not search.comes_to_its_end():
            return
        pids = [pid for pid in search.carriers if not _is_uninterruptible(pid)]
        if pids:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)


def _is_uninterruptible(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"
    except OSError:
        return True


def children(pid: int) -> list[int]:
    """Return the children of a process; empty if it is gone."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
