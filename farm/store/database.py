"""The database of a farm: reads on pooled connections, writes grouped by one writer thread per process.

Many rollouts end a stage at the same time, and a commit costs more than its statements. So all writes that wait while
one transaction runs go into the next one together. SQLite then has one writer per process to contend with, not hundreds
of threads.

If the database is unavailable, callers wait for it, and a worker without limit: a finished stage is worth more than a
slot. A commit whose answer is lost may still have been made. So every write may run twice, and must recognize its own
earlier result.

A heartbeat or a lease renewal is `urgent`: a separate thread writes it, so that it never waits for a row that other
work of the process waits for. In a process with a limited number of connections it goes before all other work, and
takes the connection from work that does not end (`ConnectionSlots`).
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

from farm.errors import InvalidRequest
from farm.home import WAIT_TIMEOUT_S
from farm.store.locks import lock_batches
from farm.store.sql.database_errors import Outage, refusal, retryable_failure, unavailable, waited_for_lock
from farm.store.sql.database_sessions import LOCK_WAIT_S, begin_write, engine_of, lock_wait_s, open_transactions
from farm.store.sql.writer import CLOSE_S, PendingWrite, Work, Writer, pauses

T = TypeVar("T")
log = logging.getLogger(__name__)

__all__ = ["Store", "Work"]
_PERIOD_S = 0.25
_MIN_WATCH_S = 1.0
_CANCEL_REQUEST_S = 5.0
_MIN_S = 1.0
"""The minimum wait of a use for its slot, even if it is not retried."""
_CANCEL_S = 1.0
"""Seconds that a cancelled statement gets to end."""
URGENT_S = 10.0
_PROBE_S = 5


@dataclass(slots=True, eq=False)
class _WatchedConnection:
    """A connection in use, checked at `look_at` and again each `limit_s`."""

    connection: Any
    limit_s: float
    look_at: float = field(default=0.0)


class StallMonitor:
    """Watches the connections of one store, in a thread that lives while any of them is in use for long.

    It breaks connections to a frozen server, which would block forever: the kernel keeps them healthy, so no network
    timeout helps. After a while without an answer, a second connection is tried. If the server answers there, the
    statement is just slow, and its own time limit applies. If not, the first connection is shut down, which its user
    sees as a broken connection.
    """

    def __init__(self, answers: Callable[[], bool]) -> None:
        self._answers = answers
        self._uses: set[_WatchedConnection] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watched(self, connection: Connection, limit_s: float) -> Iterator[None]:
        """Break the connection if the body takes longer than `limit_s` and the server answers on no other either."""
        limit_s = max(_MIN_WATCH_S, limit_s)
        use = _WatchedConnection(connection.connection.dbapi_connection, limit_s, time.monotonic() + limit_s)
        with self._lock:
            self._uses.add(use)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="store-stalled", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._uses.discard(use)

    def _run(self) -> None:
        idle_until = time.monotonic() + 60.0
        while True:
            time.sleep(_PERIOD_S)
            now = time.monotonic()
            with self._lock:
                overdue = [use for use in self._uses if now >= use.look_at]
                if self._uses:
                    idle_until = now + 60.0
                elif now > idle_until:
                    self._thread = None
                    return
            if overdue:
                self._look_at(overdue)

    def _look_at(self, overdue: list[_WatchedConnection]) -> None:
        if self._answers():
            for use in overdue:
                use.look_at = time.monotonic() + use.limit_s
            return
        for use in overdue:
            with self._lock:
                # a use that has ended since may have passed its connection to another
                if use in self._uses:
                    log.warning("Database has not answered for %.0f s; closing the connection", use.limit_s)
                    self._uses.discard(use)
                    shut(use.connection)


def shut(connection: Any) -> None:
    """Shut down a connection that another thread waits on; that thread sees it as closed by the server."""
    with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as there:
        there.shutdown(socket.SHUT_RDWR)


def cancel(connection: Any) -> None:
    """Ask the server to cancel a connection's statement, outside any session; the statement's user gets an error."""
    with suppress(Exception):
        connection.cancel_safe(timeout=_CANCEL_REQUEST_S)


@dataclass(slots=True, eq=False)
class Slot:
    """One use of a connection. It cannot be broken until its connection is set."""

    urgent: bool
    given: threading.Event = field(default_factory=threading.Event)
    connection: Any = None
    since: float = 0.0
    cancelled: bool = False


class ConnectionSlots:
    """The limited connections of a process, lent use by use: `n_slots` at a time, and more wait. Thread-safe.

    A process of a node has one connection, so all its reads and writes take turns on it. Three rules keep that safe:

    * An urgent use (a lease renewal, a heartbeat) is served before everything else that waits.
    * It waits at most `urgent_s` for the present use. Then the server is asked to cancel that use's statement, and a
      second later the connection is broken. Cancelled work is rolled back and repeated afterwards, as after any broken
      connection.
    * No other use waits longer than its timeout. A query that is not retried waits a second, so that a thread with many
      queries, such as the one that renews leases, is never blocked by the work of another thread.
    """

    def __init__(self, n_slots: int, urgent_s: float) -> None:
        self._n_free = n_slots
        self._urgent_s = urgent_s
        self._waiting: deque[Slot] = deque()
        self._used: list[Slot] = []
        self._lock = threading.Lock()

    @contextmanager
    def slot(self, left_s: float, *, urgent: bool = False) -> Iterator[Slot]:
        """Hold a slot while the body runs. Raises NoConnectionLeft (SQLAlchemy's) after waiting for `left_s`."""
        slot = Slot(urgent)
        self._enter(slot)
        try:
            if not slot.given.is_set():
                self._wait(slot, max(left_s, _MIN_S))
            yield slot
        finally:
            self._leave(slot)

    def uses(self, slot: Slot, connection: Any) -> None:
        """Set the driver's connection of a slot."""
        with self._lock:
            slot.connection = connection

    def _enter(self, slot: Slot) -> None:
        with self._lock:
            if not slot.urgent:
                self._waiting.append(slot)
            else:
                n_before = sum(each.urgent for each in self._waiting)
                self._waiting.insert(n_before, slot)
            self._give()

    def _leave(self, slot: Slot) -> None:
        with self._lock:
            slot.connection = None
            if slot.given.is_set():
                self._used.remove(slot)
                self._n_free += 1
                self._give()
            else:
                self._waiting.remove(slot)

    def _give(self) -> None:
        while self._n_free and self._waiting:
            slot = self._waiting.popleft()
            self._n_free -= 1
            self._used.append(slot)
            slot.since = time.monotonic()
            slot.given.set()

    def _wait(self, slot: Slot, left_s: float) -> None:
        if not slot.urgent:
            if not slot.given.wait(None if math.isinf(left_s) else left_s):
                raise NoConnectionLeft(f"this process used its connection for something else for {left_s:.0f} s")
            return
        wait_s = self._urgent_s
        while not slot.given.wait(wait_s):
            self._end_longest()
            wait_s = _CANCEL_S

    def _end_longest(self) -> None:
        """Cancel the oldest use, or break its connection if it was already cancelled."""
        with self._lock:
            slot = next((each for each in self._used if not each.urgent and each.connection is not None), None)
            if slot is None:
                return
            connection, used_s = slot.connection, time.monotonic() - slot.since
            if slot.cancelled:
                slot.connection = None
                shut(connection)
            else:
                # in another thread and without the lock, as it sends a request to the server
                threading.Thread(target=cancel, args=(connection,), name="store-cancel", daemon=True).start()
        log.warning(
            "Database use has taken %.0f s while a lease or heartbeat is due: it is %s, and retried afterwards",
            *(used_s, "cut off" if slot.cancelled else "cancelled"),
        )
        slot.cancelled = True


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
                    value = work(connection)
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
                return value
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
