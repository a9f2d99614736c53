"""Database connections of a process: pools, and timeouts of their sessions.

No session may block others for long, whatever happens to its process: the server ends a session that is idle in a
transaction, limits the wait for a lock, and probes a silent peer with keepalives. These settings are made by a
statement in each new session and not as start-up options, which PgBouncer refuses.

So a session must belong to one client only: a pooler that passes it on between transactions would leave the settings,
and prepared statements, to the next client. Each session is marked, and a new one that already has the mark is refused.
With `pooler=transaction` in the URL nothing is kept in sessions: each write transaction makes its own settings, and no
statement is prepared.

A process with few connections for all its work waits a shorter time for a lock: a statement that did not get it is
retried, and others use the connection in between.

An open connection to SQLite continues on a file that was removed or replaced, and a new connection creates an empty
file. So a store remembers the file that it opened first, and uses no other.
"""

from __future__ import annotations

import os
import random
import socket
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from farm.errors import InvalidRequest, StoreGone
from farm.store.sql.sanitize import written

LOCK_WAIT_S = 10.0
"""Seconds after which waiting for a lock in Postgres fails, and may be retried."""
SHARED_LOCK_WAIT_S = 2.0
"""The same for a process with a limited number of connections; longer than Postgres takes to find a deadlock."""
_SQLITE_LOCK_WAIT_S = 20.0
_POOL = (5, 10)
"""Connections that a process keeps, and how many more it may open for a while, unless it has a limit."""
# a connection that was cut without notice would block for hours; no effect on a Unix socket
_TCP = {
    "connect_timeout": 10,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
SESSION: Mapping[str, str] = {
    # locks of a client that is disconnected, stopped or hangs in the middle of a transaction
    "idle_in_transaction_session_timeout": "10s",
    "lock_timeout": f"{LOCK_WAIT_S:g}s",
    "statement_timeout": "5min",
    # the server's side of a connection that was cut without notice
    "tcp_keepalives_idle": "15",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "30s",
    # the farm's statements are short, and JIT compilation takes longer than it saves
    "jit": "off",
}
"""Settings of every session on Postgres; a setting in the URL's own `options` has priority."""
_MARK = "farm.session"
_SHARED = (
    "a pooler shares the database's sessions between clients, such as PgBouncer in transaction mode: add "
    "pooler=transaction to the database's URL of every process, set its pool_mode = session (and leave "
    "server_reset_query as it is), or connect to Postgres itself"
)
_QUESTION_MARK = "the file's path has a `?`, which begins the options of a URL: write %3F"
_POOLER, _BY_TRANSACTION = "pooler", "transaction"
POOLED = "pooled"
"""The execution option of a database behind a pooler, where the server's connection limit does not apply."""
_OF_CONNECTION = "tcp_"
"""The prefix of settings of the server's connection, which belongs to the pooler."""

_WRITE_LOCK = "120"
"""The byte in a WAL's shared memory that a writer locks: https://sqlite.org/walformat.html#wal_locks"""

# the farm's own transactions take milliseconds
_OPEN = text(
    "SELECT pid, application_name, client_addr, state, extract(epoch FROM clock_timestamp() - xact_start) AS age_s "
    "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND xact_start < clock_timestamp() - interval '2 s' ORDER BY xact_start"
)


def engine_of(url: str, n_connections: int | None) -> tuple[Engine, SqliteFile | None]:
    """Return the pool of a database, and its file if it is SQLite. Raises InvalidRequest for a URL it cannot use."""
    try:
        parsed = make_url(url)
        if parsed.drivername in {"postgresql", "postgres"}:
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() == "sqlite":
            if "?" in url and not parsed.query:
                # else SQLite would use another file, the one named before the question mark
                raise InvalidRequest(_QUESTION_MARK, field="store_url")
            return _sqlite(str(parsed.database or ""), parsed.render_as_string(hide_password=False))
        if parsed.get_backend_name() == "postgresql":
            return _postgres(parsed, n_connections), None
    except (ArgumentError, NoSuchModuleError) as error:
        raise InvalidRequest(f"not a database URL: {error}", field="store_url") from error
    raise InvalidRequest(f"{parsed.drivername} is neither sqlite nor postgresql", field="store_url")


def lock_wait_s(n_connections: int | None) -> float:
    """Return how long a process with this many connections waits for a lock; None is without a limit."""
    return LOCK_WAIT_S if n_connections is None else SHARED_LOCK_WAIT_S


def _postgres(url: URL, n_connections: int | None) -> Engine:
    """Return the connection pool of a Postgres. Raises InvalidRequest for an unknown kind of pooler."""
    pooler = url.query.get(_POOLER, "")
    if pooler not in ("", _BY_TRANSACTION):
        raise InvalidRequest(f"pooler={pooler} is unknown: use {_BY_TRANSACTION}", field="store_url")
    url = url.difference_update_query([_POOLER])
    options: dict[str, Any] = {name: value for name, value in _TCP.items() if name not in url.query}
    options.setdefault("application_name", f"farm {socket.gethostname()}/{os.getpid()}")
    if pooler:
        options["prepare_threshold"] = None
    size, more = _POOL if n_connections is None else (n_connections, 0)
    # no ping before use: a query on a broken connection is repeated on another
    engine = create_engine(
        url,
        hide_parameters=True,
        pool_size=size,
        max_overflow=more,
        pool_recycle=1800,
        connect_args={name: value for name, value in options.items() if name not in url.query},
        json_serializer=written,
        execution_options={POOLED: bool(pooler)},
    )
    own = str(url.query.get("options", ""))
    session = {**SESSION, "lock_timeout": f"{lock_wait_s(n_connections):g}s"}
    settings = {name: value for name, value in session.items() if name not in own}
    if pooler:
        _set_by_transaction(
            engine, {name: value for name, value in settings.items() if not name.startswith(_OF_CONNECTION)}
        )
    else:
        _set_by_session(engine, settings)
    return engine


def _set_by_transaction(engine: Engine, settings: Mapping[str, str]) -> None:
    statement = "SELECT " + ", ".join("set_config(%s, %s, true)" for _ in settings)
    values = tuple(part for pair in settings.items() for part in pair)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection.info.pop("write", False):
            connection.exec_driver_sql(statement, values)


def _set_by_session(engine: Engine, settings: Mapping[str, str]) -> None:
    """Let each new session make its settings, and refuse one that was configured for another client."""
    pairs = [*settings.items(), (_MARK, "in use")]
    statement = f"SELECT current_setting('{_MARK}', true), " + ", ".join("set_config(%s, %s, false)" for _ in pairs)
    values = [part for pair in pairs for part in pair]

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, record: Any) -> None:
        connection.autocommit = True
        (marked, *_) = connection.execute(statement, values).fetchone()
        connection.autocommit = False
        if marked:
            connection.close()
            raise InvalidRequest(_SHARED, field="store_url")


def _sqlite(path: str, url: str) -> tuple[Engine, SqliteFile]:
    if not path or path == ":memory:":
        raise InvalidRequest("the store must be a file that all processes can open", field="store_url")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    waits_itself = {"timeout": 0, "check_same_thread": False}
    engine = create_engine(url, hide_parameters=True, connect_args=waits_itself, json_serializer=written)
    file = SqliteFile(path)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # transactions begin where we say, not where the driver guesses
        connection.execute("PRAGMA busy_timeout=10000")
        # takes effect only in a new file: pruned pages are returned later in small steps (`farm.store.retention`)
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("PRAGMA busy_timeout=0")
        file.opened()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection.info.pop("write", False):
            _begin_immediate(connection, file)
        else:
            connection.exec_driver_sql("BEGIN")

    return engine, file


def begin_write(connection: Connection) -> None:
    """Make the next transaction of a connection take the write lock at its start, or make its own settings behind a
    pooler.
    """
    connection.info["write"] = True


def _begin_immediate(connection: Connection, file: SqliteFile) -> None:
    """Take SQLite's write lock. SQLite's own waiting grows to 100 ms and is unfair; short random pauses are neither."""
    deadline = time.monotonic() + _SQLITE_LOCK_WAIT_S
    cursor = connection.connection.cursor()
    while True:
        try:
            cursor.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            if time.monotonic() > deadline:
                raise file.locked(_SQLITE_LOCK_WAIT_S) from error
        time.sleep(random.uniform(0.0002, 0.001))  # noqa: S311 - no secret


class SqliteFile:
    """The file at a path, from its first opening on."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).absolute()
        self._known: tuple[int, int] | None = None

    def opened(self) -> None:
        """Remember the identity of the file, the first time."""
        if self._known is None:
            self._known = self._file_identity()

    def check(self) -> None:
        """Raise StoreGone if the opened file is no longer at its path."""
        if self._known is None or self._file_identity() == self._known:
            return
        change = "replaced by another" if self.path.exists() else "removed"
        raise StoreGone(
            f"the database file {self.path} was {change} while it was in use: end this process, put the file back, "
            "start again"
        )

    def _file_identity(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self.path)  # noqa: PTH116 - it is called at every statement
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def locked(self, waited_s: float) -> sqlite3.OperationalError:
        """Return the error for a write lock timeout, with the holder of the lock if the kernel tells."""
        return sqlite3.OperationalError(
            f"database is locked: {self.holder() or 'another process'} has held the write lock of {self.path} for "
            f"{waited_s:.0f} s or more; if it is stopped or hangs, let it go on or end it"
        )

    def holder(self) -> str:
        """Return the process that holds the write lock; empty if unknown."""
        try:
            inode = os.stat(f"{self.path}-shm").st_ino  # noqa: PTH116
            locks = Path("/proc/locks").read_text().splitlines()
        except OSError:
            return ""
        for line in locks:
            # 1: POSIX  ADVISORY  WRITE 1234 fd:01:5678 120 120
            words = line.split()
            if len(words) == 8 and words[3] == "WRITE" and words[5].endswith(f":{inode}") and words[6] == _WRITE_LOCK:
                return f"process {words[4]}{_command(words[4])}"
        return ""


def _command(pid: str) -> str:
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    words = " ".join(word.decode(errors="replace") for word in argv[:4])[:120].strip()
    return f" ({words}{', stopped' if state in 'tT' else ''})"


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A session of the database whose transaction has been open for `age_s`."""

    pid: int
    where: str
    state: str
    age_s: float

    @property
    def is_silent(self) -> bool:
        """True if its client has sent no statement since the last one ended."""
        return self.state.startswith("idle in transaction")

    def __str__(self) -> str:
        return f"session {self.pid} of {self.where}, {self.state} for {self.age_s:.0f} s"


def open_transactions(connection: Connection) -> list[OpenTransaction]:
    """Return the transactions of other sessions that are open for seconds, the oldest first; none for SQLite."""
    if connection.dialect.name != "postgresql":
        return []
    return [
        OpenTransaction(
            row.pid,
            f"{row.application_name or 'a program'} at {row.client_addr or 'this machine'}",
            row.state or "",
            float(row.age_s),
        )
        for row in connection.execute(_OPEN)
    ]


def silent_transactions(connection: Connection) -> list[OpenTransaction]:
    """Return only those with a silent session."""
    return [each for each in open_transactions(connection) if each.is_silent]
