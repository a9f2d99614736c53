"""A thread of the leading dispatcher that processes ended rollouts outside the dispatch rounds.

It adds them to histograms, sends their traces, and queues webhooks for ended batches and alarms.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from sqlalchemy import Connection

from farm.errors import FarmError, NotFound, StoreUnavailable
from farm.observing.periodic_thread import PeriodicThread
from farm.observing.rollout_traces import TraceExporter
from farm.store.database import Store
from farm.store.reports import histograms
from farm.store.reports.traced_rollouts import ended_between, traced
from farm.store.webhooks import outbox

log = logging.getLogger(__name__)

_PERIOD_S = 2.0
_COLLECTOR_AWAY_S = 60.0
_TRACES_S = 30.0
"""The time limit for traces per pass: a slow collector must not delay histograms and webhooks."""


class Observer:
    """Runs every few seconds while `leads` returns True."""

    def __init__(
        self,
        store: Store,
        leads: Callable[[], bool],
        otel_endpoint: str = "",
        webhook_url: str = "",
        traces_s: float = _TRACES_S,
    ) -> None:
        self._store = store
        self._leads = leads
        self._webhook_url = webhook_url
        self._alarms = AlarmLog()
        self._otel_endpoint = otel_endpoint
        self._exporter: TraceExporter | None = None
        self._traces_at = -math.inf
        self._traces_s = traces_s
        self._traces_until = math.inf
        fault = "Ended rollouts not counted yet; retrying"
        self._thread = PeriodicThread("observer", _PERIOD_S, self._look_if_leading, log, fault)

    def start(self) -> None:
        if self._webhook_url:
            logging.getLogger().addHandler(self._alarms)
        self._thread.start()

    def close(self) -> None:
        logging.getLogger().removeHandler(self._alarms)
        self._thread.close()
        if self._exporter is not None:
            self._exporter.close()

    def _look_if_leading(self) -> None:
        if self._leads():
            self.look()

    def look(self) -> None:
        """Count the rollouts that ended since the last pass, and queue webhooks."""
        self._put_alarms()
        self._traces_until = time.monotonic() + self._traces_s
        for batch_id, after, last in self._store.read(histograms.uncounted):
            if self._thread.closed:
                return
            try:
                self._count(batch_id, after, last)
            except StoreUnavailable:
                raise
            except Exception as error:
                log.warning("Batch %s: ended rollouts not counted yet; retrying: %s", batch_id, error)

    def _put_alarms(self) -> None:
        if not (alarms := self._alarms.take()):
            return
        try:
            self._store.write(partial(outbox.put_alarms, alarms=alarms, url=self._webhook_url))
        except Exception:
            self._alarms.give_back(alarms)
            raise

    def _count(self, batch_id: str, after: int, last: int) -> None:
        found = self._store.read(partial(histograms.counted, batch_id=batch_id, after=after, last=last))
        add = partial(self._add, batch_id=batch_id, after=after, last=last, found=found)
        if self._store.write(add) and self._otel_endpoint:
            self._send_traces(batch_id, after, last)

    def _add(self, connection: Connection, batch_id: str, after: int, last: int, found: histograms.Histograms) -> bool:
        if not histograms.add(connection, batch_id, after, last, found):
            return False
        outbox.put_ended(connection, batch_id, last, self._webhook_url)
        return True

    def _send_traces(self, batch_id: str, after: int, last: int) -> None:
        """Send the traces of rollouts; an unavailable collector gets none for a while, and those are lost."""
        if time.monotonic() < self._traces_at:
            return
        try:
            if self._exporter is None:
                self._exporter = TraceExporter(self._otel_endpoint)
            for rollout_id in self._store.read(partial(ended_between, batch_id=batch_id, after=after, last=last)):
                if self._thread.closed:
                    return
                if time.monotonic() > self._traces_until:
                    self._leave_out(f"{self._otel_endpoint} took more than {self._traces_s:g} s for those of one look")
                    return
                try:
                    found = self._store.read(partial(traced, rollout_id=rollout_id))
                except NotFound:
                    continue
                if not self._exporter.export(*found):
                    self._leave_out(f"{self._otel_endpoint} does not take them")
                    return
        except FarmError as error:
            self._leave_out(str(error))

    def _leave_out(self, why: str) -> None:
        self._traces_at = time.monotonic() + _COLLECTOR_AWAY_S
        log.warning("Traces are dropped for %.0f s: %s", _COLLECTOR_AWAY_S, why)


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
