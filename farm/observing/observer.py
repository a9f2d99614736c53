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
from typing import NamedTuple

from sqlalchemy import Connection, select

from farm.errors import FarmError, NotFound, StoreUnavailable
from farm.observing.periodic_thread import PeriodicThread
from farm.observing.timeline import TraceExporter
from farm.records.rollout import Rollout, Timing
from farm.records.trajectory import ModelCall
from farm.store import batches
from farm.store.database import Store
from farm.store.reports import histograms
from farm.store.rollouts import rollouts
from farm.store.sql.schema import ModelCallRow
from farm.store.webhooks import outbox

_calls = ModelCallRow.__table__

log = logging.getLogger(__name__)

_PERIOD_S = 2.0
_COLLECTOR_AWAY_S = 60.0
_TRACES_S = 30.0
"""The time limit for traces per pass: a slow collector must not delay histograms and webhooks."""


class TracedRollout(NamedTuple):
    """A rollout, its stages, and its calls by attempt."""

    rollout: Rollout
    timings: list[Timing]
    calls: dict[int, list[ModelCall]]


def ended_between(connection: Connection, batch_id: str, after: int, last: int) -> list[str]:
    """Return the rollouts of a batch with end numbers in (`after`, `last`]."""
    ended = (rollouts.c.batch_id == batch_id, rollouts.c.finish_seq > after, rollouts.c.finish_seq <= last)
    return list(connection.execute(select(rollouts.c.rollout_id).where(*ended)).scalars())


def traced(connection: Connection, rollout_id: str) -> TracedRollout:
    """Return one rollout for its trace. Raises NotFound."""
    calls: dict[int, list[ModelCall]] = {}
    for attempt, call in _calls_of(connection, rollout_id):
        calls.setdefault(attempt, []).append(call)
    rollout = batches.rollout(connection, rollout_id)
    return TracedRollout(rollout, batches.timings(connection, rollout_id), calls)


def _calls_of(connection: Connection, rollout_id: str) -> Iterator[tuple[int, ModelCall]]:
    names = (
        *("attempt", "call_index", "response", "finish_reason", "engine", "policy_version"),
        *("started_at", "latency_s", "n_prompt_tokens", "n_response_tokens"),
    )
    statement = (
        select(*[_calls.c[name] for name in names])
        .where(_calls.c.rollout_id == rollout_id)
        .order_by(_calls.c.attempt, _calls.c.call_index)
    )
    for row in connection.execute(statement).mappings():
        values = dict(row)
        yield values.pop("attempt"), ModelCall(index=values.pop("call_index"), messages=[], **values)


class Observer(PeriodicThread):
    """Runs every few seconds while `leads` returns True."""

    def __init__(
        self,
        store: Store,
        leads: Callable[[], bool],
        otel_endpoint: str = "",
        webhook_url: str = "",
        traces_s: float = _TRACES_S,
    ) -> None:
        super().__init__("observer", _PERIOD_S, leads, self.look, log, "Ended rollouts not counted yet; retrying")
        self._store = store
        self._webhook_url = webhook_url
        self._alarms = AlarmLog()
        self._otel_endpoint = otel_endpoint
        self._exporter: TraceExporter | None = None
        self._traces_at = -math.inf
        self._traces_s = traces_s
        self._traces_until = math.inf

    def start(self) -> None:
        if self._webhook_url:
            logging.getLogger().addHandler(self._alarms)
        super().start()

    def close(self) -> None:
        logging.getLogger().removeHandler(self._alarms)
        super().close()
        if self._exporter is not None:
            self._exporter.close()

    def look(self) -> None:
        """Count the rollouts that ended since the last pass, and queue webhooks."""
        self._put_alarms()
        self._traces_until = time.monotonic() + self._traces_s
        for batch_id, after, last in self._store.read(histograms.uncounted):
            if self.closed:
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
        counts = self._store.read(partial(histograms.counted, batch_id=batch_id, after=after, last=last))
        add = partial(self._add, batch_id=batch_id, after=after, last=last, counts=counts)
        if self._store.write(add) and self._otel_endpoint:
            self._send_traces(batch_id, after, last)

    def _add(self, connection: Connection, batch_id: str, after: int, last: int, counts: histograms.Histograms) -> bool:
        if not histograms.add(connection, batch_id, after, last, counts):
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
                if self.closed:
                    return
                if time.monotonic() > self._traces_until:
                    self._leave_out(f"{self._otel_endpoint} took more than {self._traces_s:g} s for those of one look")
                    return
                try:
                    trace = self._store.read(partial(traced, rollout_id=rollout_id))
                except NotFound:
                    continue
                if not self._exporter.export(*trace):
                    self._leave_out(f"{self._otel_endpoint} does not take them")
                    return
        except FarmError as error:
            self._leave_out(str(error))

    def _leave_out(self, reason: str) -> None:
        self._traces_at = time.monotonic() + _COLLECTOR_AWAY_S
        log.warning("Traces are dropped for %.0f s: %s", _COLLECTOR_AWAY_S, reason)


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
