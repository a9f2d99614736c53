"""The state of this node and this process during scoring: exhausted resources, and delays of the event loop.

A program that fails on a full disk, or whose time limit passed while the machine was stalled, says nothing about the
policy. The program's own end does not show that, so it is measured separately: before, during and after.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

from workers.config import own_config
from workers.sandboxes.shortage import watched

_PERIOD_S = 0.1
_MIN_DISK_BYTES = 4 << 20
_MIN_INODES = 64
_MIN_MEMORY_KB = 32 << 10
_MIN_DESCRIPTORS = 16
_MIN_THREADS = 16


@dataclass(slots=True)
class Conditions:
    """The measured conditions. `late_s` is the total delay of this event loop's wake-ups, the time it was stalled.

    `shortage` names an exhausted resource of the node, with a remedy; empty if there was none. It is `earlier` if it
    was exhausted before the measurement began. Memory counts as exhausted if the kernel killed processes for lack of
    it.
    """

    late_s: float = 0.0
    shortage: str = ""
    earlier: bool = False


@asynccontextmanager
async def observed() -> AsyncIterator[Conditions]:
    """Measure while the block runs; the yielded conditions are complete once the block has ended."""
    before = shortage()
    conditions = Conditions(shortage=before, earlier=bool(before))
    with watched(own_config().sandboxes) as window:
        window.on_disk = True
        ticker = asyncio.ensure_future(_tick(conditions))
        try:
            yield conditions
        finally:
            ticker.cancel()
            with suppress(asyncio.CancelledError):
                await ticker
            conditions.shortage = conditions.shortage or shortage() or window.reason()


async def _tick(conditions: Conditions) -> None:
    loop = asyncio.get_running_loop()
    due = loop.time() + _PERIOD_S
    try:
        while True:
            await asyncio.sleep(due - loop.time())
            conditions.late_s += max(0.0, loop.time() - due)
            due = loop.time() + _PERIOD_S
    finally:
        # The end of the block may itself have been late.
        conditions.late_s += max(0.0, loop.time() - due)


def shortage(folders: tuple[Path, ...] | None = None) -> str:
    """Return the first exhausted resource of this node or this process, with a remedy; empty if there is none."""
    for folder in (own_config().sandboxes.scratch, Path(gettempdir())) if folders is None else folders:
        if words := _disk(folder):
            return words
    return _memory() or _descriptors() or _threads()


def _disk(folder: Path) -> str:
    try:
        room = os.statvfs(folder)
    except OSError:
        # No sandbox was started on this node yet.
        return ""
    # Some file systems report no counts.
    if room.f_blocks and room.f_bavail * room.f_frsize < _MIN_DISK_BYTES:
        return f"the disk of {folder} is full: free some, or set FARM_SCRATCH to another"
    if room.f_files and room.f_favail < _MIN_INODES:
        return f"the disk of {folder} has no inodes left: remove files, or set FARM_SCRATCH to another"
    return ""


def _memory() -> str:
    with suppress(OSError), open("/proc/meminfo") as file:  # noqa: PTH123
        for line in file:
            if line.startswith("MemAvailable:") and int(line.split()[1]) < _MIN_MEMORY_KB:
                return "the node has no memory left: run fewer rollouts at a time"
    return ""


def _descriptors() -> str:
    used, _, most = (int(word) for word in Path("/proc/sys/fs/file-nr").read_text().split())
    if most - used < _MIN_DESCRIPTORS:
        return "the node has no file descriptors left: raise the sysctl fs.file-max"
    try:
        n_own = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  (pathlib would need one more descriptor)
    except OSError:
        return "this worker has no file descriptors left: start it with a higher `ulimit -n`"
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] - n_own < _MIN_DESCRIPTORS:
        return "this worker has no file descriptors left: start it with a higher `ulimit -n`"
    return ""


def _threads() -> str:
    n_threads = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    most = min(int(Path(f"/proc/sys/kernel/{name}").read_text()) for name in ("threads-max", "pid_max"))
    return "the node cannot start more threads: run fewer rollouts" if most - n_threads < _MIN_THREADS else ""
