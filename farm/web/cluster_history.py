"""The last hour of nodes and engines, kept in the memory of this process since the first request for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from farm.errors import ServiceError

KEPT_S = 3600.0
PERIOD_S = 15.0


@dataclass(frozen=True, slots=True)
class HistorySample:
    """Numbers at one time, by name."""

    at: float
    values: dict[str, float]


class ClusterHistory:
    """Samples that `look` takes every PERIOD_S, until nobody has requested them for KEPT_S."""

    def __init__(self, look: Callable[[], dict[str, float]]) -> None:
        self._look = look
        self._samples: deque[HistorySample] = deque(maxlen=round(KEPT_S / PERIOD_S))
        self._asked_at = 0.0
        self._thread: threading.Thread | None = None

    def keep(self) -> None:
        """Begin or continue to take samples."""
        self._asked_at = time.monotonic()
        if self._thread is None or not self._thread.is_alive():
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

    def _run(self) -> None:
        while time.monotonic() - self._asked_at < KEPT_S:
            # no samples while the database is unavailable
            with suppress(ServiceError):
                self._samples.append(HistorySample(time.time(), self._look()))
            time.sleep(PERIOD_S)
