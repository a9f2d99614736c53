"""Limits of a sandbox that were reached, as the watcher noted, the kernel counted or an exit code tells, in words."""

from __future__ import annotations

import signal
from pathlib import Path

from workers.sandboxes import cgroups

_FILE = "notices"
_SIGNALS = {signal.SIGXCPU: "CPU time limit reached", signal.SIGXFSZ: "file size limit reached"}


class Notices:
    """What was noted in a sandbox's folder since this object was made or last asked."""

    def __init__(self, state: Path, cgroup: str = "") -> None:
        self._path = state / _FILE
        self._n_read = self._size()
        self._cgroup = cgroup
        self._n_killed = cgroups.n_killed(cgroup) if cgroup else 0

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def take(self, code: int | None = 0) -> str:
        """The limits that were reached, in words, of which the exit `code` of a command may tell; empty if none."""
        found = []
        size = self._size()
        if size > self._n_read:
            with self._path.open() as file:
                file.seek(self._n_read)
                found = file.read(size - self._n_read).splitlines()
            self._n_read = size
        # the kernel counts before it kills, so that who sees the death sees the reason
        n_killed = cgroups.n_killed(self._cgroup) if self._cgroup else 0
        if n_killed > self._n_killed:
            found.append(f"memory limit of {cgroups.memory_mb(self._cgroup)} MB reached")
            self._n_killed = n_killed
        if code:
            number = -code if code < 0 else code - 128
            found += [words for name, words in _SIGNALS.items() if name == number]
        return "; ".join(dict.fromkeys(found))
