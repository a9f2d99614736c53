"""Time limits of waits: a wait ends in vain only if the machine had time for what is waited for.

A second counts for as much of it as a process got of the processors: with three busy processes on each core a limit of
60 s ends after 180 s. So a limit says how much a quiet machine may take, and no test fails because another one runs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

LONG_S = 600.0
"""For calls that measure by the clock on the wall: it only has to end some time."""
_LEAST_SHARE = 0.05


class Deadline:
    """A limit in seconds of a machine on which nothing else runs."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._left_s = seconds
        self._seen_at = time.monotonic()

    def passed(self) -> bool:
        """Return whether it is over. Call it repeatedly: the load at each call counts."""
        now = time.monotonic()
        self._left_s -= (now - self._seen_at) * share(n_runnable(), len(os.sched_getaffinity(0)))
        self._seen_at = now
        return self._left_s <= 0


def share(n_runnable: int, n_cores: int) -> float:
    """Return the part of a processor that each runnable process gets, as if they were served in turn."""
    return max(min(1.0, n_cores / max(1, n_runnable)), _LEAST_SHARE)


def n_runnable() -> int:
    """Return how many processes of the machine run or wait for a processor at this moment."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
