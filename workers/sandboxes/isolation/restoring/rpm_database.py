"""The files of packages in a database of rpm, of the kind `sqlite`; standard library only.

A policy may have written the database. So it is read whole into memory first, with a bound, and nothing in it is
believed to lie where it says: a header that is not whole has no files. SQLite reads a copy in memory, in which neither
views nor virtual tables are asked, for a bounded number of steps.

It is rpm's own kind since 4.16, of Fedora 33 and RHEL 9. Databases of older ones (Berkeley DB) and of openSUSE (`ndb`)
are not read, nor is what lies in a write-ahead log beside it, which rpm empties when it ends. A header is described in
`lib/header.c` of rpm.
"""

from __future__ import annotations

import contextlib
import itertools
import posixpath
import struct

# now, as its files may be closed to the user that this process becomes; a Python may be built without it
try:
    import sqlite3
except ImportError:
    sqlite3 = None  # type: ignore[assignment]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES = 100_000_000
_MAX_FILES = 2_000_000
_MAX_ENTRIES = 65_535
_DIRINDEXES, _BASENAMES, _DIRNAMES = 1116, 1117, 1118
_INT32, _STRING_ARRAY = 4, 8
_ENTRY = struct.Struct(">iIiI")
_COUNTS = struct.Struct(">II")
_STEPS = 100_000
_MAX_TURNS = 1000
"""Of 100,000 steps of SQLite: a table of a million rows takes fewer."""
_ROLLBACK = b"\1\1"
"""Versions of a database without a write-ahead log, which one in memory cannot have."""
_ASKED = "SELECT blob FROM main.Packages WHERE typeof(blob) = 'blob'"
_IS_TABLE = "SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = 'Packages' AND rootpage > 0"


def files_of(data: bytes) -> Iterator[str]:
    """Yield the paths, without a slash before them, that a database has; none if it cannot be read."""
    files = itertools.chain.from_iterable(map(_files, _bounded(_headers(data), len(data))))
    return itertools.islice(files, _MAX_FILES)


def _bounded(headers: Iterator[bytes], n_bytes: int) -> Iterator[bytes]:
    """Yield headers as long as all together fit into the database: some may lie over each other."""
    for header in headers:
        n_bytes -= len(header)
        if n_bytes < 0:
            return
        yield header


def _headers(data: bytes) -> Iterator[bytes]:
    if sqlite3 is None or not hasattr(sqlite3.Connection, "deserialize"):
        return
    turns = itertools.count()
    with contextlib.closing(sqlite3.connect(":memory:")) as database, contextlib.suppress(sqlite3.Error, ValueError):
        # a column may be computed
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, len(data))
        database.deserialize(data[:18] + _ROLLBACK + data[20:])
        database.execute("PRAGMA trusted_schema = OFF")
        database.execute("PRAGMA query_only = ON")
        database.set_progress_handler(lambda: next(turns) >= _MAX_TURNS, _STEPS)
        if database.execute(_IS_TABLE).fetchone():
            for (header,) in database.execute(_ASKED):
                yield header


def _files(header: bytes) -> Iterator[str]:
    """Yield the files that the header of a package names."""
    try:
        n_entries, n_bytes = _COUNTS.unpack_from(header)
        store = _COUNTS.size + n_entries * _ENTRY.size
        if n_entries > _MAX_ENTRIES or store + n_bytes > len(header):
            return
        entries = [_ENTRY.unpack_from(header, _COUNTS.size + n * _ENTRY.size) for n in range(n_entries)]
        found = {tag: (offset, count) for tag, kind, offset, count in entries if (tag, kind) in _WANTED and offset >= 0}
        names, folders = (_strings(header, store, *found[tag]) for tag in (_BASENAMES, _DIRNAMES))
        offset, count = found[_DIRINDEXES]
        indexes = struct.unpack_from(f">{count}I", header, store + offset)
    except (struct.error, KeyError, MemoryError):
        return
    for name, index in zip(names, indexes, strict=False):
        if index < len(folders):
            yield posixpath.normpath(posixpath.join("/", folders[index], name)).strip("/")


_WANTED = {(_BASENAMES, _STRING_ARRAY), (_DIRNAMES, _STRING_ARRAY), (_DIRINDEXES, _INT32)}


def _strings(header: bytes, store: int, offset: int, count: int) -> list[str]:
    """Return an array of strings that end with a zero; shorter if the header does."""
    if count > len(header):
        return []
    parts = header[store + offset :].split(b"\0", count)
    return [part.decode("utf-8", "surrogateescape") for part in parts[:count]]
