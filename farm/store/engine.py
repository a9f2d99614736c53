"""The database of a farm: reads on pooled connections, writes grouped by one writer thread per process.

Many rollouts end a stage at the same time, and a commit costs more than its statements. So whatever waits to be
written while one transaction runs goes into the next together. It also leaves SQLite one writer per process to
contend with, not hundreds of threads. A write that the database refuses is run again alone, so that it harms no other.

A database that is away is waited for, by a worker without end: a stage that has been played is worth more than a slot.
A commit whose answer is lost may have been made all the same; so whatever is written may be written twice, and every
write must know its own work when it finds it done.
"""

from __future__ import annotations

import logging
import math
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

from farm.errors import InvalidRequest, StoreUnavailable
from farm.store.plain import written

T = TypeVar("T")
Work: TypeAlias = Callable[[Connection], T]

log = logging.getLogger(__name__)

PATIENCE_S = 30.0
_GROUP = 128
_LOCK_WAIT_S = 60.0
_CLOSE_S = (5.0, 30.0)
"""When it is closed, what waits for a database that is away gets the first, and all that waits the second."""
_PAUSE_S = (0.02, 1.0)
_N_ALONE = 10
"""So often a write is tried that breaks its connection, while the database answers others."""
_SAY_S = (1.0, 30.0)
"""An outage is told in the log once it has lasted this long, and again after that."""
# a connection that was cut without a word would be waited on for hours; of no account on a Unix socket
_TCP = {
    "connect_timeout": 10,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


class Store:
    """A database, by URL. Work given to `write` may run more than once and must be guarded accordingly.

    What the database does not answer for `patience_s` seconds raises StoreUnavailable; `math.inf` waits without end.
    Raises InvalidRequest for a URL it cannot use.
    """

    def __init__(self, url: str, patience_s: float = PATIENCE_S) -> None:
        self.url = url
        self.engine = _engine(url)
        self._patience_s = patience_s
        # a lone query needs no transaction, which would cost Postgres two round trips
        self._reading = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._waiting: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closes_at = math.inf
        self._no_reads = _Outage("reads")
        self._no_writes = _Outage("writes")

    @property
    def name(self) -> str:
        """The URL without its password, for people."""
        return self.engine.url.render_as_string(hide_password=True)

    def read(self, work: Work[T], patience_s: float | None = None) -> T:
        """Run queries; each sees what is committed when it runs. `patience_s` in place of the store's own."""
        deadline = time.monotonic() + (self._patience_s if patience_s is None else patience_s)
        for pause_s in _pauses():
            try:
                with self._reading.connect() as connection:
                    found = work(connection)
            except Exception as error:
                if _trouble(error) is None:
                    raise
                if time.monotonic() + pause_s > min(deadline, self._closes_at):
                    raise _unavailable(error) from error
                self._no_reads.noticed(error)
            else:
                self._no_reads.over()
                return found
            time.sleep(pause_s)
        raise AssertionError("pauses have no end")

    def write(self, work: Work[T]) -> T:
        """Run statements in a transaction and wait until they are committed."""
        return self.submit(work).result()

    def submit(self, work: Work[T]) -> Future[T]:
        """As `write`, without waiting. What is cancelled while it waits is not written."""
        if self._writer is None:
            self._start()
        write = _Write(work, Future(), time.monotonic() + self._patience_s)
        self._waiting.put(write)
        return write.future

    def close(self) -> None:
        """Write what waits, and let the connections go. What a database that is away keeps waiting is given up."""
        self._closes_at = time.monotonic() + _CLOSE_S[0]
        if self._writer is not None:
            self._waiting.put(None)
            self._writer.join(_CLOSE_S[1])
            self._writer = None
        self.engine.dispose()
        self._closes_at = math.inf

    def _start(self) -> None:
        with self._starting:
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_groups, name="store-writer", daemon=True)
                self._writer.start()

    def _write_groups(self) -> None:
        left: list[_Write] = []
        pauses = _pauses()
        ended = False
        while not ended or left:
            group, ended = self._gathered(left, ended)
            left = self._tried([each for each in group if each.is_wanted(self._closes_at)])
            if left:
                time.sleep(next(pauses))
            else:
                pauses = _pauses()

    def _gathered(self, left: list[_Write], ended: bool) -> tuple[list[_Write], bool]:
        """What is written next, with what was `left` first; and whether nothing will follow."""
        group = list(left)
        while len(group) < _GROUP and not ended:
            try:
                item = self._waiting.get(block=not group)
            except queue.Empty:
                break
            if item is None:
                ended = True
            else:
                group.append(item)
        return group, ended

    def _tried(self, group: list[_Write]) -> list[_Write]:
        """Write a group: what is to be tried again later, because the database is away."""
        if not group:
            return []
        try:
            results = self._transaction([each.work for each in group])
        except BaseException as error:
            return self._failed(group, error)
        self._no_writes.over()
        for each, result in zip(group, results, strict=True):
            each.succeed(result)
        return []

    def _failed(self, group: list[_Write], error: BaseException) -> list[_Write]:
        trouble = _trouble(error)
        if trouble is Trouble.AWAY or (trouble is Trouble.BROKEN and not self._answers()):
            self._no_writes.noticed(error)
            for each in group:
                each.error = error
            return group
        if len(group) > 1:
            log.debug("a group of %d writes failed; each is tried alone", len(group), exc_info=error)
            return self._tried_alone(group)
        one = group[0]
        one.error = error
        one.n_alone += 1
        if trouble is not None and one.n_alone < _N_ALONE:
            return group
        one.fail(error if trouble is None else _unavailable(error))
        return []

    def _tried_alone(self, group: list[_Write]) -> list[_Write]:
        left: list[_Write] = []
        for n, each in enumerate(group):
            left += self._tried([each])
            if self._no_writes.lasts:
                return left + group[n + 1 :]
        return left

    def _transaction(self, works: list[Work[Any]]) -> list[Any]:
        with self.engine.connect() as connection:
            _begin_write(connection)
            with connection.begin():
                return [work(connection) for work in works]

    def _answers(self) -> bool:
        """Whether a new question is answered: then it was not the database that broke a connection, but what it was
        asked."""
        try:
            with self._reading.connect() as connection:
                connection.exec_driver_sql("SELECT 1")
        except Exception:
            return False
        return True


@dataclass(slots=True, eq=False)
class _Write:
    """Something to write, and who waits for it."""

    work: Work[Any]
    future: Future[Any]
    deadline: float
    error: BaseException | None = None
    n_alone: int = 0

    def is_wanted(self, closes_at: float) -> bool:
        """Whether to try it (again). Who waited for it may be gone by now, or is told that it took too long."""
        if self.future.cancelled():
            self.future.set_running_or_notify_cancel()
            return False
        if self.error is not None and time.monotonic() > min(self.deadline, closes_at):
            self.fail(_unavailable(self.error))
            return False
        return True

    def succeed(self, result: Any) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class _Outage:
    """Says in the log that the database is away, and when it is back."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._since = math.inf
        self._say_at = math.inf
        self._said = False

    @property
    def lasts(self) -> bool:
        return self._since < math.inf

    def noticed(self, error: BaseException) -> None:
        now = time.monotonic()
        if not self.lasts:
            self._since, self._say_at = now, now + _SAY_S[0]
        elif now >= self._say_at:
            self._say_at, self._said = now + _SAY_S[1], True
            log.warning("the database does not answer; %s wait for it: %s", self._what, _first_line(error))

    def over(self) -> None:
        if self.lasts:
            since, self._since = self._since, math.inf
            if self._said:
                self._said = False
                log.warning("the database answers again; %s waited %.0f s", self._what, time.monotonic() - since)


def _begin_write(connection: Connection) -> None:
    connection.info["write"] = True


def _pauses() -> Iterator[float]:
    """Seconds to wait between tries: they grow, and differ, so that a farm does not come back all at once."""
    pause_s, longest_s = _PAUSE_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        pause_s = min(pause_s * 2, longest_s)


class Trouble(Enum):
    """Why the same statements may succeed later."""

    AWAY = auto()
    """The database says so itself: its disk is full, it has no connection left, somebody holds all of it."""
    BROKEN = auto()
    """The connection broke, or was ended."""
    CONFLICT = auto()
    """Another transaction was in the way, or there was too little memory or time for this one."""


_SQLITE_AWAY = ("locked", "busy", "disk I/O", "unable to open", "disk is full")
_AWAY = {"25006", "58030"}
"""Read-only, as of a standby that is about to be promoted; and a disk that fails."""
_CONFLICTS = {"53200", "55P03", "57014"}
"""Too little memory; a lock, or all of it, took longer than somebody allows."""


def _trouble(error: BaseException) -> Trouble | None:
    """None if there is no hope."""
    orig = getattr(error, "orig", None) or error
    state = getattr(orig, "sqlstate", None)
    if isinstance(error, NoConnectionLeft):
        return Trouble.AWAY
    if isinstance(orig, sqlite3.OperationalError):
        return Trouble.AWAY if any(word in str(orig) for word in _SQLITE_AWAY) else None
    if state is not None:
        if state[:2] == "40" or state in _CONFLICTS:
            return Trouble.CONFLICT
        if state[:2] == "53" or state in _AWAY:
            return Trouble.AWAY
    broken = getattr(error, "connection_invalidated", False) or (state or "")[:2] in {"08", "57"}
    return Trouble.BROKEN if broken or (state is None and type(orig).__name__ == "OperationalError") else None


def _unavailable(error: BaseException) -> StoreUnavailable:
    return StoreUnavailable(f"the database does not answer: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return str(getattr(error, "orig", None) or error).partition("\n")[0]


def _engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.drivername in {"postgresql", "postgres"}:
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() == "sqlite":
            return _sqlite(str(parsed.database or ""), parsed.render_as_string(hide_password=False))
        if parsed.get_backend_name() == "postgresql":
            # no ping before use: what a broken connection was asked is asked again on another
            options = {name: value for name, value in _TCP.items() if name not in parsed.query}
            return create_engine(
                parsed,
                hide_parameters=True,
                pool_size=5,
                max_overflow=10,
                pool_recycle=1800,
                connect_args=options,
                json_serializer=written,
            )
    except (ArgumentError, NoSuchModuleError) as error:
        raise InvalidRequest(f"not a database URL: {error}", field="store_url") from error
    raise InvalidRequest(f"{parsed.drivername} is neither sqlite nor postgresql", field="store_url")


def _sqlite(path: str, url: str) -> Engine:
    if not path or path == ":memory:":
        raise InvalidRequest("the store must be a file that all processes share", field="store_url")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    waits_itself = {"timeout": 0, "check_same_thread": False}
    engine = create_engine(url, hide_parameters=True, connect_args=waits_itself, json_serializer=written)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # transactions begin where we say, not where the driver guesses
        for pragma in ("busy_timeout=10000", "journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("PRAGMA busy_timeout=0")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection.info.pop("write", False):
            _begin_immediate(connection)
        else:
            connection.exec_driver_sql("BEGIN")

    return engine


def _begin_immediate(connection: Connection) -> None:
    """Take SQLite's write lock. Its own waiting grows to 100 ms and is unfair; short random waits are neither."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    cursor = connection.connection.cursor()
    while True:
        try:
            cursor.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0.0002, 0.001))  # noqa: S311 - no secret
