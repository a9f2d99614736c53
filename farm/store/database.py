"""The database of a farm: reads on pooled connections, writes grouped by one writer thread per process.

Many rollouts end a stage at the same time, and a commit costs more than its statements. So all writes that wait while
one transaction runs go into the next one together. SQLite then has one writer per process to contend with, not hundreds
of threads.

If the database is unavailable, callers wait for it, and a worker without limit: a finished stage is worth more than a
slot. A commit whose answer is lost may still have been made. So every write may run twice, and must recognize its own
earlier result.

A heartbeat or a lease renewal is `urgent`: a separate thread writes it, so that it never waits for a row that other
work of the process waits for. In a process with a limited number of connections it goes before all other work, and
takes the connection from work that does not end (`connection_slots`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection

from farm.address import WAIT_TIMEOUT_S
from farm.errors import InvalidRequest
from farm.store.locks import lock_batches
from farm.store.sql.connection_slots import ConnectionSlots, StallMonitor
from farm.store.sql.database_errors import Outage, refusal, retryable_failure, unavailable, waited_for_lock
from farm.store.sql.database_sessions import LOCK_WAIT_S, begin_write, engine_of, lock_wait_s, open_transactions
from farm.store.sql.writer import CLOSE_S, PendingWrite, Work, Writer, pauses

T = TypeVar("T")

__all__ = ["Store", "Work"]

log = logging.getLogger(__name__)

URGENT_S = 10.0
_PROBE_S = 5


class Store:
    """A database, by URL. Work given to `write` may run more than once and must be guarded accordingly.

    If the database does not answer for `patience_s` seconds, StoreUnavailable is raised; `math.inf` waits without
    limit. If it refuses the first connection, for a wrong password or name, `read` raises InvalidRequest at once. A
    process has at most `n_connections` to Postgres, and an urgent write waits at most `urgent_s` for one of them.
    Raises InvalidRequest for an unusable URL, and all methods raise StoreGone once the file of a SQLite store is gone.
    """

    def __init__(
        self, url: str, patience_s: float = WAIT_TIMEOUT_S, n_connections: int | None = None, urgent_s: float = URGENT_S
    ) -> None:
        self.url = url
        self.engine, self._file = engine_of(url, n_connections)
        # a file may have any number of readers, and SQLite itself allows one writer at a time
        bounded = n_connections is not None and self._file is None
        self._slots = ConnectionSlots(n_connections, urgent_s) if bounded and n_connections is not None else None
        self._lock_wait_s = lock_wait_s(n_connections)
        self._blocked_logged_at = -math.inf
        self._timeout_s = patience_s
        self._has_answered = False
        # a single query needs no transaction, which would cost Postgres two round trips
        self._reading = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._writer = Writer("store-writer", self._transaction, self._answers)
        self._urgent = Writer("store-urgent", partial(self._transaction, urgent=True), self._answers)
        self._closes_at = math.inf
        self._no_reads = Outage("reads")
        self._stalled = StallMonitor(self._accepts_connections)

    @property
    def name(self) -> str:
        """The URL without its password, for display."""
        return self.engine.url.render_as_string(hide_password=True)

    @property
    def is_there(self) -> bool:
        """True if the store's file exists, or the store is not a file."""
        return self._file is None or self._file.path.exists()

    def read(self, work: Work[T], patience_s: float | None = None) -> T:
        """Run queries; each sees what is committed when it runs. `patience_s` overrides the store's own."""
        deadline = time.monotonic() + (self._timeout_s if patience_s is None else patience_s)
        for pause_s in pauses():
            try:
                with self._connected(deadline - time.monotonic(), reading=True) as connection:
                    result = work(connection)
            except Exception as error:
                if not self._has_answered and (refused := refusal(error)):
                    raise InvalidRequest(refused, field="store_url") from error
                if retryable_failure(error) is None:
                    raise
                if time.monotonic() + pause_s > min(deadline, self._closes_at):
                    raise unavailable(error) from error
                self._no_reads.noticed(error)
            else:
                self._has_answered = True
                self._no_reads.over()
                return result
            time.sleep(pause_s)
        raise AssertionError("pauses have no end")

    def write(self, work: Work[T], *, urgent: bool = False, batch_id: str = "", rollout_id: str = "") -> T:
        """Run statements in a transaction and wait until they are committed. See `submit` for the rest."""
        return self.submit(work, urgent=urgent, batch_id=batch_id, rollout_id=rollout_id).result()

    def submit(self, work: Work[T], *, urgent: bool = False, batch_id: str = "", rollout_id: str = "") -> Future[T]:
        """Queue a write without waiting for it. It is not made if its future is cancelled before.

        Writes of a process are grouped, in the order of the rollouts that they change. So each names its rollout, and
        its batch if the rollout may end. An `urgent` one changes only rows that no other write locks for long.
        """
        write = PendingWrite(work, Future(), time.monotonic() + self._timeout_s, batch_id, rollout_id)
        (self._urgent if urgent else self._writer).put(write)
        return write.future

    def close(self) -> None:
        """Write pending writes and close the connections. Writes that an unavailable database delays are dropped."""
        self._closes_at = time.monotonic() + CLOSE_S
        self._writer.close()
        self._urgent.close()
        self.engine.dispose()
        self._closes_at = math.inf

    @contextmanager
    def _connected(self, left_s: float, *, reading: bool, urgent: bool = False) -> Iterator[Connection]:
        """Yield a connection; if a frozen server blocks it, it is broken well before the time limit."""
        if self._file is not None:
            self._file.check()
        with ExitStack() as stack:
            slot = stack.enter_context(self._slots.slot(left_s, urgent=urgent)) if self._slots is not None else None
            connection = stack.enter_context((self._reading if reading else self.engine).connect())
            if self._slots is not None and slot is not None:
                self._slots.uses(slot, connection.connection.dbapi_connection)
            if self._file is None:
                stack.enter_context(self._stalled.watched(connection, min(left_s, WAIT_TIMEOUT_S) / 2))
            yield connection

    def _transaction(self, group: Sequence[PendingWrite], *, urgent: bool = False) -> list[Any]:
        """Run a group of writes and commit. Returns their results in order."""
        in_order = sorted(range(len(group)), key=lambda n: group[n].rollout_id)
        results: dict[int, Any] = {}
        try:
            with self._connected(self._timeout_s, reading=False, urgent=urgent) as connection:
                begin_write(connection)
                with connection.begin():
                    if len(group) > 1:
                        lock_batches(connection, {each.batch_id for each in group if each.batch_id})
                    for n in in_order:
                        results[n] = group[n].work(connection)
        except Exception as error:
            if waited_for_lock(error):
                self._tell_who_blocks()
            raise
        return [results[n] for n in range(len(group))]

    def _tell_who_blocks(self) -> None:
        """Log the holder of the lock, but not at each retry."""
        if time.monotonic() - self._blocked_logged_at < LOCK_WAIT_S:
            return
        try:
            with self._connected(_PROBE_S, reading=True) as connection:
                holder = next(iter(open_transactions(connection)), None)
        except Exception:
            holder = None
        if holder is not None:
            self._blocked_logged_at = time.monotonic()
        waits = f"Lock in the database not acquired within {self._lock_wait_s:g} s; it waits for"
        if holder is not None and holder.is_silent:
            log.error("ALARM %s %s: check its client, or end it with SELECT pg_terminate_backend(pid)", waits, holder)
        else:
            log.warning("%s %s", waits, holder or "another transaction")

    def _answers(self) -> bool:
        """Return whether a new query is answered: then the failed statement broke only its own connection."""
        try:
            with self._connected(_PROBE_S, reading=True) as connection:
                connection.exec_driver_sql("SELECT 1")
        except Exception:
            return False
        return True

    def _accepts_connections(self) -> bool:
        """Return whether the database answers on a new connection outside the pool."""
        dialect = self.engine.dialect
        try:
            arguments, names = dialect.create_connect_args(self.engine.url)
            dialect.connect(*arguments, **{**names, "connect_timeout": _PROBE_S}).close()
        except Exception:
            return False
        return True
