"""Backup of a store while its farm runs, and restore of a backup. A backup is a consistent snapshot.

SQLite is copied by pages and Postgres by rows, both in one read transaction, which blocks no writer. A restore is one
transaction, so it is applied completely or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from sqlalchemy import JSON, Connection, Table, func, literal, select, update

from farm.configuration.service_urls import sqlite_url
from farm.errors import Conflict, NotAllowed
from farm.home import KEY_FILE, own_home, write_own
from farm.settings import settings
from farm.store import epoch, migrations
from farm.store.access.sealed_secrets import FILE as SECRET_KEY_FILE
from farm.store.access.sealed_secrets import check_secret_key, secret_key_file
from farm.store.backups.backup_file import (
    TABLES,
    BackupFile,
    check_replaceable,
    describe,
    new_file,
    read_backup,
    rows_at_a_time,
)
from farm.store.database import Store
from farm.store.leader import leaders
from farm.store.nodes import nodes
from farm.store.rollouts import batches, rollouts
from farm.store.sql.clock import age_of

_ALIASES = "image_aliases.json"
_PAGES = 1024
_DAY_S = 86_400.0
_NOT_MISSED = ("leaders", "epochs", "nodes", "engine_users", "histograms", "named_weights", "audit_log", "engines")
"""Tables that have rows in an unused farm, apart from its nodes and its first engine."""


def back_up(store: Store, path: Path, check: Callable[[], object] = lambda: None) -> BackupFile:
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
            describe(connection, manifest, _files(store))
            connection.commit()
            # one file, without a WAL next to it
            connection.execute("PRAGMA journal_mode = DELETE")
        made = read_backup(part)
    return dataclasses.replace(made, path=path)


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
            names = ", ".join(_as_text(column.name, column.type) for column in table.columns)
            marks = ", ".join("?" for _ in table.columns)
            query = f'SELECT {names} FROM "{table.name}"'  # noqa: S608
            result = source.exec_driver_sql(query, execution_options={"yield_per": rows_at_a_time(table)})
            for rows in result.partitions():
                check()
                copy.executemany(f'INSERT INTO "{table.name}" VALUES ({marks})', [tuple(row) for row in rows])  # noqa: S608
        copy.commit()


def _as_text(name: str, kind: object) -> str:
    return f'"{name}"::text' if isinstance(kind, JSON) else f'"{name}"'


def _files(store: Store) -> dict[str, bytes]:
    """Return the farm's files that a store restored elsewhere needs to be the same farm, if they exist."""
    found = {}
    for name, path in _places(store).items():
        with contextlib.suppress(OSError):
            found[name] = path.read_bytes()
    return found


def _places(store: Store) -> Mapping[str, Path]:
    key = secret_key_file(store.engine.url)
    return {each.name: each for each in (key, key.with_name(KEY_FILE), key.with_name(_ALIASES))}


def restore(store: Store, backup: BackupFile, replace: bool = False) -> list[Path]:
    """Restore a store from a backup, and the farm's files that are missing. Returns those files.

    Processes that saw a newer state of the store are told that it went back. Raises Conflict, and changes nothing, if
    data would be lost without `replace`, or if a node is alive.
    """
    if migrations.revision(store) is None:
        migrations.migrate(store)
    migrations.check(store)
    store.read(lambda connection: _check_target(connection, store, replace))
    written = _put_files(store, backup, replace)

    def work(connection: Connection) -> None:
        _check_target(connection, store, replace)
        if connection.dialect.name == "sqlite":
            for table in reversed(TABLES):
                connection.execute(table.delete())
        else:
            connection.exec_driver_sql(f"TRUNCATE {', '.join(table.name for table in TABLES)}")
        for table in TABLES:
            _insert(connection, table, backup)
        check_secret_key(connection)
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


def _check_target(connection: Connection, store: Store, replace: bool) -> None:
    alive = age_of(nodes.c.heartbeat_at) < settings().node_timeout_s
    names = connection.execute(select(nodes.c.node).where(alive)).scalars().all()
    if names:
        raise Conflict(
            f"{store.name} is in use: node {names[0]} sent a heartbeat within {settings().node_timeout_s:g} s; end its "
            "nodes first, or wait"
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


def _put_files(store: Store, backup: BackupFile, replace: bool) -> list[Path]:
    written = []
    for name, path in _places(store).items():
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
        if path.parent == settings().home.absolute():
            own_home(path.parent)
        write_own(path, text)
        written.append(path)
    return written
