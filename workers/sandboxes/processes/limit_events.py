"""Limits that a sandbox reached, in words: noted by the watcher, counted by the kernel or shown by an exit code."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from workers.sandboxes import cgroups

_FILE = "notices"
_SIGNALS = {signal.SIGXCPU: "CPU time limit reached", signal.SIGXFSZ: "file size limit reached"}


class LimitEvents:
    """The limits noted in a sandbox's folder since this object's creation (or `from_start`) or the last `take`."""

    def __init__(self, state: Path, cgroup: str = "", *, from_start: bool = False) -> None:
        self._path = str(state / _FILE)
        self._n_read = 0 if from_start else self._size()
        self._cgroup = cgroup
        self._n_killed = cgroups.n_killed(cgroup) if cgroup and not from_start else 0

    def _size(self) -> int:
        # called twice per command, and the file rarely exists: this is the cheapest test
        return os.stat(self._path).st_size if os.access(self._path, os.F_OK) else 0  # noqa: PTH116

    def take(self, code: int | None = 0) -> str:
        """Return the reached limits in words, including those shown by the exit `code` of a command; empty if none."""
        result = []
        size = self._size()
        if size > self._n_read:
            with Path(self._path).open() as file:
                file.seek(self._n_read)
                result = file.read(size - self._n_read).splitlines()
            self._n_read = size
        # the kernel counts before it kills, so the reason is available when the end is noticed
        n_killed = cgroups.n_killed(self._cgroup) if self._cgroup else 0
        if n_killed > self._n_killed:
            result.append(f"memory limit of {cgroups.memory_mb(self._cgroup)} MB reached")
            self._n_killed = n_killed
        if code:
            number = -code if code < 0 else code - 128
            result += [words for name, words in _SIGNALS.items() if name == number]
        return "; ".join(dict.fromkeys(result))
