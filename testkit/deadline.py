"""Time limits of waits that scale with the load of the machine: a wait fails only if the machine had time for the work.

A second counts by the share of a processor that a process got: with three busy processes on each core a limit of 60 s
ends after 180 s. So a limit is the time on a quiet machine, and no test fails because another one runs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

LONG_S = 600.0
"""For calls that measure wall-clock time: it only has to end some time."""
_LEAST_SHARE = 0.05


class Deadline:
    """A limit in seconds on an otherwise idle machine."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._left_s = seconds
        self._seen_at = time.monotonic()

    def passed(self) -> bool:
        """Return whether the time is over. Call it repeatedly: the load at each call counts."""
        now = time.monotonic()
        self._left_s -= (now - self._seen_at) * share(n_runnable(), len(os.sched_getaffinity(0)))
        self._seen_at = now
        return self._left_s <= 0


def share(n_runnable: int, n_cores: int) -> float:
    """Return the share of a processor that each runnable process gets, if they are served in turn."""
    return max(min(1.0, n_cores / max(1, n_runnable)), _LEAST_SHARE)


def n_runnable() -> int:
    """Return the number of processes that run or wait for a processor at this moment."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
