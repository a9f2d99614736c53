"""A thread of the leading dispatcher that repeats one kind of work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_JOIN_S = 2.0


class PeriodicThread:
    """Works every `period_s` seconds from `start` to `close`, while `leads` returns True.

    An exception of the work is logged, after `fault`.
    """

    def __init__(
        self,
        name: str,
        period_s: float,
        leads: Callable[[], bool],
        work: Callable[[], object],
        log: logging.Logger,
        fault: str,
    ) -> None:
        self._period_s = period_s
        self._leads = leads
        self._work = work
        self._log = log
        self._fault = fault
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def closed(self) -> bool:
        """True once it should end: long work checks this now and then."""
        return self._closed.is_set()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End; wait for running work, but not for long."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_S)

    def _run(self) -> None:
        while not self._closed.wait(self._period_s):
            try:
                if self._leads():
                    self._work()
            except Exception as error:
                self._log.warning("%s: %s", self._fault, error)
