"""Exact CPU time by part, by control groups of version 1, which include ended processes and single threads.

Sums over /proc miss the processes of sandboxes: nobody waits for them, so their time goes to no parent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from testkit.processes import tree

_ROOT = Path("/sys/fs/cgroup/cpuacct")
_MAIN = "main"


class CpuParts:
    """Parts by name, each a control group: it includes all that its processes start from then on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: list[str] = []

    def put(self, part: str, pids: Iterable[int]) -> None:
        """Count these processes, with all their threads, as a part."""
        self._write(part, "cgroup.procs", pids)

    def put_threads(self, part: str, thread_ids: Iterable[int]) -> None:
        """Count these threads as a part, separately from their processes."""
        self._write(part, "tasks", thread_ids)

    def _write(self, part: str, file: str, ids: Iterable[int]) -> None:
        group = self._folder / part.replace(" ", "_")
        if part not in self._names:
            group.mkdir()
            self._names.append(part)
        for number in ids:
            # the process may have ended
            with contextlib.suppress(ProcessLookupError):
                (group / file).write_text(str(number))

    def used_s(self) -> dict[str, float]:
        """Return the CPU seconds of each part so far."""
        usage = ((name, self._folder / name.replace(" ", "_") / "cpuacct.usage") for name in self._names)
        return {name: int(path.read_text()) / 1e9 for name, path in usage}

    def close(self) -> None:
        """Remove the groups; processes in them return to the group of this process."""
        for group in [*self._folder.iterdir(), self._folder]:
            if group.is_dir():
                for pid in (group / "cgroup.procs").read_text().split():
                    with contextlib.suppress(OSError):
                        (self._folder.parent / "cgroup.procs").write_text(pid)
                with contextlib.suppress(OSError):
                    group.rmdir()


@contextmanager
def cpu_parts() -> Iterator[CpuParts | None]:
    """Yield parts until the block ends; None without such control groups, or without root, which may create them."""
    folder = _ROOT / f"farm-benchmark-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        yield None
        return
    parts = CpuParts(folder)
    try:
        yield parts
    finally:
        parts.close()


def threads(pid: int) -> dict[int, str]:
    """Return the threads of a process by id: their names, `main` for the first."""
    folder = Path(f"/proc/{pid}/task")
    named = {int(each.name): (each / "comm").read_text().strip() for each in folder.iterdir()}
    return named | {pid: _MAIN}


def put_farm(parts: CpuParts, root: int) -> None:
    """Put the processes of a farm, all descendants of `root`, into parts, and the threads of its workers."""
    for pid in tree(root):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        if "redis-server" in command:
            parts.put("messages", [pid])
        elif "workers.node" in command or "workers.queue fork-server" in command:
            parts.put("node", [pid])
        elif "-n init@" in command:
            _put_worker(parts, pid, "sandbox start", {})
            parts.put("sandbox start", tree(pid)[1:])
        elif "-n run@" in command:
            _put_worker(parts, pid, "stages", {"rollouts": "agent loop"})
            parts.put("tool calls", tree(pid)[1:])
        elif "-n eval@" in command:
            _put_worker(parts, pid, "scoring", {})


def _put_worker(parts: CpuParts, pid: int, part: str, named: dict[str, str]) -> None:
    """Put a worker's threads into parts: the main thread, the store's writer; all others into `part`."""
    known = {_MAIN: "messages", "store-writer": "store", "store-urgent": "store", **named}
    for number, name in threads(pid).items():
        parts.put_threads(known.get(name, part), [number])
