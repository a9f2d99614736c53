"""A backup: a SQLite file with the tables of a store at one moment, a manifest, and files of the farm's folder.

While it is written, its name begins with a dot and its writer holds a lock on it; it is renamed when it is complete and
synced. The next backup of the same name replaces the incomplete file of a killed writer.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Table

from farm.errors import Conflict, InvalidRequest, StoreUnavailable
from farm.store.migrations import head
from farm.store.sql.schema import Base

_MANIFEST, _FILES = "backup_manifest", "backup_files"
_SIGN = b"SQLite format 3\0"
TABLES = tuple(Base.metadata.sorted_tables)
"""The tables of a store, each after the tables that it refers to."""


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


_ROWS = 64
_ROWS_OF_MEGABYTES = 4


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
            if (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise InvalidRequest(f"{path} is damaged: {found}", field="file")
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


_COUNTED = ("batches", "rollouts")


def _check_schema(path: Path, connection: sqlite3.Connection, version: str) -> None:
    (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone() or ("none",)
    wrong = "" if revision == head() else f"has schema revision {revision}, this farm needs {head()}"
    for table in TABLES:
        found = {name for _, name, *_ in connection.execute(f'PRAGMA table_info("{table.name}")')}
        if not wrong and found != {column.name for column in table.columns}:
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
