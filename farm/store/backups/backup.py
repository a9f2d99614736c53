"""Backup of a store while its farm runs, and restore of a backup. A backup is a consistent snapshot.

SQLite is copied by pages and Postgres by rows, both in one read transaction, which blocks no writer. A restore is one
transaction, so it is applied completely or not at all.

The file is a SQLite file with the tables of a store at one moment, a manifest, and files of the farm's folder. While it
is written, its name begins with a dot and its writer holds a lock on it; it is renamed when it is complete and synced.
The next backup of the same name replaces the incomplete file of a killed writer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from sqlalchemy import JSON, Connection, Table, func, literal, select, update

from farm.configuration.service_urls import sqlite_url
from farm.errors import Conflict, InvalidRequest, NotAllowed, StoreUnavailable
from farm.home import KEY_FILE, own_home, write_own
from farm.store import epoch, migrations
from farm.store.access.sealed_secrets import FILE as SECRET_KEY_FILE
from farm.store.access.sealed_secrets import SecretKey
from farm.store.database import Store
from farm.store.leader import leaders
from farm.store.migrations import head
from farm.store.nodes import nodes
from farm.store.rollouts import batches, rollouts
from farm.store.sql.clock import age_of
from farm.store.sql.schema import Base

_MANIFEST, _FILES = "backup_manifest", "backup_files"
_SIGN = b"SQLite format 3\0"
TABLES = tuple(Base.metadata.sorted_tables)
"""The tables of a store, each after the tables that it refers to."""

_ROWS = 64
_ROWS_OF_MEGABYTES = 4
_COUNTED = ("batches", "rollouts")
_PAGES = 1024
_DAY_S = 86_400.0
_NOT_MISSED = ("leaders", "epochs", "nodes", "engine_users", "histograms", "named_weights", "audit_log", "engines")
"""Tables that have rows in an unused farm, apart from its nodes and its first engine."""


@dataclass(frozen=True, slots=True)
class BackupFile:
    """A complete backup that this version can read. `files` are those of the farm's folder, by name."""

    path: Path
    made_at: float
    version: str
    n_batches: int
    n_rollouts: int
    files: Mapping[str, bytes]

    def rows(self, table: Table) -> Iterator[list[tuple[object, ...]]]:
        """Yield the rows of a table in chunks, with JSON as text."""
        names = ", ".join(f'"{column.name}"' for column in table.columns)
        with closing(_opened(self.path)) as connection:
            cursor = connection.execute(f'SELECT {names} FROM "{table.name}"')  # noqa: S608 - names of ours
            while rows := cursor.fetchmany(rows_at_a_time(table)):
                yield rows


def rows_at_a_time(table: Table) -> int:
    """Return the chunk size for a table: rows with experts have megabytes each."""
    return _ROWS_OF_MEGABYTES if table.name == "call_experts" else _ROWS


def read_backup(path: Path) -> BackupFile:
    """Check a backup. Raises InvalidRequest if it is none or damaged, StoreUnavailable for another schema."""
    with path.open("rb") as file:
        if file.read(len(_SIGN)) != _SIGN:
            raise InvalidRequest(f"{path} is not a backup of a farm", field="file")
    try:
        with closing(_opened(path)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not {_MANIFEST, _FILES} <= tables:
                raise InvalidRequest(f"{path} is a database, but not a backup made by `farm backup`", field="file")
            known = dict(connection.execute(f"SELECT name, value FROM {_MANIFEST}"))  # noqa: S608 - no text of others
            _check_schema(path, connection, known["version"])
            if (status := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise InvalidRequest(f"{path} is damaged: {status}", field="file")
            counts = [connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in _COUNTED]  # noqa: S608
            files = dict(connection.execute(f"SELECT name, data FROM {_FILES}"))  # noqa: S608
    except sqlite3.DatabaseError as error:
        raise InvalidRequest(f"{path} is damaged: {error}", field="file") from error
    return BackupFile(path, float(known["made_at"]), known["version"], counts[0], counts[1], files)


def check_replaceable(path: Path) -> None:
    """Raise InvalidRequest for an existing file that is no backup, such as the store itself."""
    if not path.exists() or not path.stat().st_size:
        return
    try:
        with closing(_opened(path)) as connection:
            connection.execute(f"SELECT name FROM {_MANIFEST}").fetchone()  # noqa: S608 - our own table name
    except sqlite3.DatabaseError:
        raise InvalidRequest(f"{path} exists and is not a backup: name another file", field="file") from None


def _check_schema(path: Path, connection: sqlite3.Connection, version: str) -> None:
    (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone() or ("none",)
    wrong = "" if revision == head() else f"has schema revision {revision}, this farm needs {head()}"
    for table in TABLES:
        columns = {name for _, name, *_ in connection.execute(f'PRAGMA table_info("{table.name}")')}
        if not wrong and columns != {column.name for column in table.columns}:
            wrong = f"has a table {table.name} of another form"
    if wrong:
        raise StoreUnavailable(
            f"{path} {wrong}: restore it with the version of the farm that made it ({version}), then `farm migrate`"
        )


def describe(connection: sqlite3.Connection, manifest: Mapping[str, str], files: Mapping[str, bytes]) -> None:
    """Write the manifest and the farm's files into a backup."""
    connection.execute(f"CREATE TABLE {_MANIFEST} (name TEXT PRIMARY KEY, value TEXT)")
    connection.execute(f"CREATE TABLE {_FILES} (name TEXT PRIMARY KEY, data BLOB)")
    connection.executemany(f"INSERT INTO {_MANIFEST} VALUES (?, ?)", list(manifest.items()))  # noqa: S608
    connection.executemany(f"INSERT INTO {_FILES} VALUES (?, ?)", list(files.items()))  # noqa: S608


def _opened(path: Path) -> sqlite3.Connection:
    # immutable: nobody writes it, and in a read-only folder SQLite could not create a WAL
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield an empty file with owner-only access, which is renamed to `path` if the block succeeds, else removed.

    Raises Conflict while another process writes this backup.
    """
    part = path.with_name(f".{path.name}.part")
    with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Conflict(f"another process is writing {path}: wait until it has finished") from None
        held.truncate(0)
        part.chmod(0o600)
        try:
            yield part
            os.fsync(held.fileno())
            part.replace(path)
            _sync(path.parent)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            for end in ("-journal", "-wal", "-shm"):
                with suppress(FileNotFoundError):
                    part.with_name(part.name + end).unlink()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def back_up(store: Store, secret_key: SecretKey, path: Path, check: Callable[[], object] = lambda: None) -> BackupFile:
    """Write a backup to `path`, which is replaced once the new file is complete.

    Raises Conflict while another process writes it, InvalidRequest for an existing file that is no backup.

    `check` is called now and then, and may raise: then `path` stays as it was.
    """
    check_replaceable(path)
    with new_file(path) as part:
        if store.engine.dialect.name == "sqlite":
            _copy_pages(str(store.engine.url.database), part, check)
        else:
            with contextlib.closing(Store(sqlite_url(part))) as empty:
                migrations.migrate(empty)
            _copy_rows(store, part, check)
        manifest = {"made_at": str(time.time()), "version": version("rollout-farm"), "of": store.engine.dialect.name}
        with contextlib.closing(sqlite3.connect(part)) as connection, connection:
            describe(connection, manifest, _files(secret_key))
            connection.commit()
            # one file, without a WAL next to it
            connection.execute("PRAGMA journal_mode = DELETE")
        backup = read_backup(part)
    return dataclasses.replace(backup, path=path)


def _copy_pages(source: str, part: Path, check: Callable[[], object]) -> None:
    address = f"{Path(source).absolute().as_uri()}?mode=ro"
    with (
        contextlib.closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection,
        contextlib.closing(sqlite3.connect(part)) as copy,
    ):
        # with its own snapshot, a copy does not start over at each write of another process
        connection.execute("BEGIN")
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        connection.backup(copy, pages=_PAGES, progress=lambda status, left, total: check())


def _copy_rows(store: Store, part: Path, check: Callable[[], object]) -> None:
    snapshot = store.engine.connect().execution_options(isolation_level="REPEATABLE READ")
    with snapshot as source, source.begin(), contextlib.closing(sqlite3.connect(part)) as copy:
        for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
            source.exec_driver_sql(f"SET LOCAL {name} = 0")
        copy.execute("PRAGMA synchronous = OFF")
        for table in TABLES:
            copy.execute(f'DELETE FROM "{table.name}"')  # noqa: S608 - our own table names
            names = ", ".join(f'"{c.name}"{"::text" if isinstance(c.type, JSON) else ""}' for c in table.columns)
            marks = ", ".join("?" for _ in table.columns)
            query = f'SELECT {names} FROM "{table.name}"'  # noqa: S608
            cursor = source.exec_driver_sql(query, execution_options={"yield_per": rows_at_a_time(table)})
            for rows in cursor.partitions():
                check()
                copy.executemany(f'INSERT INTO "{table.name}" VALUES ({marks})', [tuple(row) for row in rows])  # noqa: S608
        copy.commit()


def _files(secret_key: SecretKey) -> dict[str, bytes]:
    """Return the farm's files that a store restored elsewhere needs to be the same farm, if they exist."""
    contents = {}
    for name, path in _paths(secret_key).items():
        with contextlib.suppress(OSError):
            contents[name] = path.read_bytes()
    return contents


def _paths(secret_key: SecretKey) -> Mapping[str, Path]:
    key = secret_key.file
    return {each.name: each for each in (key, key.with_name(KEY_FILE), key.with_name("image_aliases.json"))}


def restore(
    store: Store, secret_key: SecretKey, backup: BackupFile, node_timeout_s: float, replace: bool = False
) -> list[Path]:
    """Restore a store from a backup, and the farm's files that are missing. Returns those files.

    Processes that saw a newer state of the store are told that it went back. Raises Conflict, and changes nothing, if
    data would be lost without `replace`, or if a node is alive.
    """
    if migrations.revision(store) is None:
        migrations.migrate(store)
    migrations.check(store)
    store.read(lambda connection: _check_target(connection, store, node_timeout_s, replace))
    written = _put_files(secret_key, backup, replace)

    def work(connection: Connection) -> None:
        _check_target(connection, store, node_timeout_s, replace)
        if connection.dialect.name == "sqlite":
            for table in reversed(TABLES):
                connection.execute(table.delete())
        else:
            connection.exec_driver_sql(f"TRUNCATE {', '.join(table.name for table in TABLES)}")
        for table in TABLES:
            _insert(connection, table, backup)
        secret_key.check(connection)
        epoch.begin(connection, epoch.current(connection))
        _end_all_life(connection)

    try:
        store.write(work)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                _aside(path).replace(path)
        raise
    return written


def _end_all_life(connection: Connection) -> None:
    """Expire the heartbeats and leases that were valid when the backup was made."""
    connection.execute(update(nodes).values(heartbeat_at=nodes.c.heartbeat_at - _DAY_S))
    connection.execute(update(leaders).values(expires_at=0.0))
    held = rollouts.c.lease_expires_at.is_not(None)
    connection.execute(update(rollouts).where(held).values(lease_expires_at=0.0))


def _insert(connection: Connection, table: Table, backup: BackupFile) -> None:
    is_sqlite = connection.dialect.name == "sqlite"
    marks = ", ".join("?" if is_sqlite else "%s::json" if isinstance(c.type, JSON) else "%s" for c in table.columns)
    names = ", ".join(f'"{column.name}"' for column in table.columns)
    statement = f'INSERT INTO "{table.name}" ({names}) VALUES ({marks})'  # noqa: S608 - our own table names
    for rows in backup.rows(table):
        connection.exec_driver_sql(statement, rows)


def _check_target(connection: Connection, store: Store, node_timeout_s: float, replace: bool) -> None:
    alive = age_of(nodes.c.heartbeat_at) < node_timeout_s
    names = connection.execute(select(nodes.c.node).where(alive)).scalars().all()
    if names:
        raise Conflict(
            f"{store.name} is in use: node {names[0]} sent a heartbeat within {node_timeout_s:g} s; end its nodes "
            "first, or wait"
        )
    if replace:
        return
    for table in TABLES:
        if table.name not in _NOT_MISSED and connection.execute(select(literal(1)).select_from(table).limit(1)).first():
            n = connection.execute(select(func.count()).select_from(batches)).scalar_one()
            raise Conflict(
                f"{store.name} has {n} batches and is not empty ({table.name}): --replace removes all of its contents"
            )


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.replaced")


def _put_files(secret_key: SecretKey, backup: BackupFile, replace: bool) -> list[Path]:
    written = []
    for name, path in _paths(secret_key).items():
        if name not in backup.files:
            continue
        text = backup.files[name].decode("utf-8", "replace")
        if path.exists():
            if name == SECRET_KEY_FILE and path.read_text().strip() != text.strip():
                if not replace:
                    raise NotAllowed(f"{path} differs from the backup's secret key: move it away, or use --replace")
                path.replace(_aside(path))
            else:
                continue
        if path.parent == secret_key.home:
            own_home(path.parent)
        write_own(path, text)
        written.append(path)
    return written
