"""The alarms of a process: its log lines that begin with ALARM."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class AlarmLog(logging.Handler):
    """A log handler that keeps the newest alarms until they are taken."""

    _MOST = 100

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._alarms: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:
            self.handleError(record)
            return
        if message.startswith("ALARM "):
            self._alarms = [*self._alarms, message.removeprefix("ALARM ")][-self._MOST :]

    def take(self) -> list[str]:
        """Return the alarms since the last call."""
        with self._held():
            taken, self._alarms = self._alarms, []
        return taken

    def give_back(self, alarms: list[str]) -> None:
        """Keep alarms, taken before, for the next call."""
        with self._held():
            self._alarms = [*alarms, *self._alarms][-self._MOST :]

    @contextmanager
    def _held(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()
