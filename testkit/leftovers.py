"""Leaks of sandboxes on a node: processes, FUSE daemons, mounts, sockets, folders, descriptors."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from testkit.processes import tree
from testkit.scratch_folder import sandbox_config
from workers.sandboxes.isolation.namespaces import started_at

_PATIENCE_S = 20.0


class Leftovers:
    """Finds everything newer than this object that belongs to a scratch folder, or descends from this process."""

    def __init__(self, scratch: Path) -> None:
        self._mark = str(scratch).encode()
        self._before = _all_processes()
        self._n_descriptors = _n_descriptors()

    def leftovers(self) -> dict[str, list[str]]:
        """Return what is left now, by kind; zombies too."""
        pids = self._processes()
        names = [f"{pid} {_command(pid)}" for pid in pids]
        more = _n_descriptors() - self._n_descriptors
        return {
            "processes": [name for name in names if "fuse" not in name],
            "fuse_daemons": [name for name in names if "fuse" in name],
            "mounts": self._lines("/proc/self/mountinfo"),
            "sockets": self._lines("/proc/net/unix"),
            "folders": [path.name for path in sandbox_config().sandboxes_folder.glob("*")],
            "descriptors": [f"{more} more than before"] if more > 0 else [],
        }

    def settled(self) -> dict[str, list[str]]:
        """Return `leftovers()` once it is empty or time is up: a killed process takes a moment to end."""
        deadline = time.monotonic() + _PATIENCE_S
        while any((result := self.leftovers()).values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return result

    def _processes(self) -> list[int]:
        descendants = tree(os.getpid())
        new = [pid for pid, started in _all_processes() - self._before]
        return sorted(pid for pid in new if pid in descendants or self._is_marked(pid))

    def _is_marked(self, pid: int) -> bool:
        """Check command line, environment, working folder and mounts; all processes of a sandbox have its mounts."""
        for name in ("cmdline", "environ", "mountinfo"):
            with contextlib.suppress(OSError):
                if self._mark in Path(f"/proc/{pid}/{name}").read_bytes():
                    return True
        with contextlib.suppress(OSError):
            return self._mark in bytes(Path(f"/proc/{pid}/cwd").readlink())
        return False

    def _lines(self, path: str) -> list[str]:
        return [line.decode(errors="replace") for line in Path(path).read_bytes().splitlines() if self._mark in line]


def _all_processes() -> set[tuple[int, int]]:
    """Return all processes of the machine, each with its start time, as pids are reused."""
    result = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                result.add((int(folder.name), started_at(int(folder.name))))
    return result


def _n_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return words or Path(f"/proc/{pid}/comm").read_text().strip()
    return "gone"
