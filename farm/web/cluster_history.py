"""The last hour of nodes and engines, in the memory of this process."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from farm.errors import ServiceError

KEPT_S = 3600.0
PERIOD_S = 15.0


@dataclass(frozen=True, slots=True)
class HistorySample:
    """Numbers at one time, by name."""

    at: float
    values: dict[str, float]


class ClusterHistory:
    """Samples that `look` takes every PERIOD_S, from `start` until the process ends."""

    def __init__(self, look: Callable[[], dict[str, float]]) -> None:
        self._look = look
        self._samples: deque[HistorySample] = deque(maxlen=round(KEPT_S / PERIOD_S))
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Take samples from now on; later calls change nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="history", daemon=True)
            self._thread.start()

    def series(self, names: list[str]) -> list[list[float | None]]:
        """Return the times, and the values of each name at these times; None where it had none."""
        samples = list(self._samples)
        times: list[float | None] = [sample.at for sample in samples]
        return [times, *([sample.values.get(name) for sample in samples] for name in names)]

    def names(self) -> list[str]:
        """Return all names that have a value."""
        return sorted({name for sample in list(self._samples) for name in sample.values})

    def _run(self) -> NoReturn:
        while True:
            # no samples while the database is unavailable
            with suppress(ServiceError):
                self._samples.append(HistorySample(time.time(), self._look()))
            time.sleep(PERIOD_S)
