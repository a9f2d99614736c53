"""The database of a farm: reads on pooled connections, writes grouped by one writer thread per process.

Many rollouts end a stage at the same time, and a commit costs more than its statements. So whatever waits to be
written while one transaction runs goes into the next together. It also leaves SQLite one writer per process to
contend with, not hundreds of threads. A write that the database refuses is run again alone, so that it harms no other.
"""

from __future__ import annotations

import logging
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from farm.errors import InvalidRequest, StoreUnavailable

T = TypeVar("T")
Work: TypeAlias = Callable[[Connection], T]

log = logging.getLogger(__name__)

_GROUP = 128
_LOCK_WAIT_S = 60.0
_PATIENCE_S = 30.0


class Store:
    """A database, by URL. Work given to `write` may run more than once and must be guarded accordingly.

    Raises InvalidRequest for a URL it cannot use, StoreUnavailable when the database does not answer for half a minute.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = _engine(url)
        # a lone query needs no transaction, which would cost Postgres two round trips
        self._reading = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._waiting: queue.SimpleQueue[tuple[Work[Any], Future[Any]] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._starting = threading.Lock()

    @property
    def name(self) -> str:
        """The URL without its password, for people."""
        return self.engine.url.render_as_string(hide_password=True)

    def read(self, work: Work[T]) -> T:
        """Run queries; each sees what is committed when it runs."""

        def once() -> T:
            with self._reading.connect() as connection:
                return work(connection)

        return _patiently(once)

    def write(self, work: Work[T]) -> T:
        """Run statements in a transaction and wait until they are committed."""
        return self.submit(work).result()

    def submit(self, work: Work[T]) -> Future[T]:
        """As `write`, without waiting."""
        if self._writer is None:
            self._start()
        future: Future[T] = Future()
        self._waiting.put((work, future))
        return future

    def close(self) -> None:
        """Write what waits, and let the connections go."""
        if self._writer is not None:
            self._waiting.put(None)
            self._writer.join()
            self._writer = None
        self.engine.dispose()

    def _start(self) -> None:
        with self._starting:
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_groups, name="store-writer", daemon=True)
                self._writer.start()

    def _write_groups(self) -> None:
        while True:
            first = self._waiting.get()
            if first is None:
                return
            group = [first]
            ended = False
            while len(group) < _GROUP and not ended:
                try:
                    item = self._waiting.get_nowait()
                except queue.Empty:
                    break
                if item is None:
                    ended = True
                else:
                    group.append(item)
            self._write_group(group)
            if ended:
                return

    def _write_group(self, group: list[tuple[Work[Any], Future[Any]]]) -> None:
        if len(group) > 1:
            try:
                results = self._transaction([work for work, _ in group])
            except Exception:
                log.debug("a group of %d writes failed; each is tried alone", len(group), exc_info=True)
            else:
                for (_, future), result in zip(group, results, strict=True):
                    future.set_result(result)
                return
        for work, future in group:
            try:
                (result,) = _patiently(lambda work=work: self._transaction([work]))  # type: ignore[misc]
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _transaction(self, works: list[Work[Any]]) -> list[Any]:
        with self.engine.connect() as connection:
            _begin_write(connection)
            with connection.begin():
                return [work(connection) for work in works]


def _begin_write(connection: Connection) -> None:
    connection.info["write"] = True


def _patiently(action: Callable[[], T]) -> T:
    """Try again while the database is away or in a deadlock, up to half a minute."""
    deadline = time.monotonic() + _PATIENCE_S
    pause = 0.02
    while True:
        try:
            return action()
        except DBAPIError as error:
            if not _passing(error) or time.monotonic() > deadline:
                if _passing(error):
                    raise StoreUnavailable(f"the database does not answer: {error.orig}") from error
                raise
            time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            pause = min(pause * 2, 1.0)


def _passing(error: DBAPIError) -> bool:
    """Whether the same statements may succeed later: the connection broke, or another transaction was in the way."""
    if error.connection_invalidated:
        return True
    state = getattr(error.orig, "sqlstate", None)
    if state is not None:
        return bool(state[:2] in {"08", "40", "53", "57"})
    if isinstance(error.orig, sqlite3.OperationalError):
        return any(word in str(error.orig) for word in ("locked", "busy", "disk I/O", "unable to open", "disk is full"))
    return type(error.orig).__name__ == "OperationalError"


def _engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.drivername in {"postgresql", "postgres"}:
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() == "sqlite":
            return _sqlite(str(parsed.database or ""), parsed.render_as_string(hide_password=False))
        if parsed.get_backend_name() == "postgresql":
            # no ping before use: what a broken connection was asked is asked again on another
            return create_engine(parsed, pool_size=5, max_overflow=10, pool_recycle=1800)
    except (ArgumentError, NoSuchModuleError) as error:
        raise InvalidRequest(f"not a database URL: {error}", field="store_url") from error
    raise InvalidRequest(f"{parsed.drivername} is neither sqlite nor postgresql", field="store_url")


def _sqlite(path: str, url: str) -> Engine:
    if not path or path == ":memory:":
        raise InvalidRequest("the store must be a file that all processes share", field="store_url")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, connect_args={"timeout": 0, "check_same_thread": False})

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
