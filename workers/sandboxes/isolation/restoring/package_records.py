"""Files that package managers recorded in a layer. Standard library only.

A policy can forge a record. So a record only lets new files stay, and none that run by themselves.

rpm's database of the kind `sqlite` is read into memory with a bound on its size, SQLite runs a bounded number of steps
on that copy, views and virtual tables are not queried, and an invalid header counts as one without files. `sqlite` is
rpm's default since 4.16 (Fedora 33, RHEL 9). Berkeley DB (older) and `ndb` (openSUSE) are not read. A write-ahead log
is not read either; rpm empties it at its end. `lib/header.c` of rpm describes the header.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
import posixpath
import struct
from collections.abc import Iterable, Iterator

# imported early, because a later user of this process may not read its files; some Pythons are built without it
try:
    import sqlite3
except ImportError:
    sqlite3 = None  # type: ignore[assignment]

_MAX_BYTES = 20_000_000
_OF_DPKG = "var/lib/dpkg/info/"
_OF_APK = "lib/apk/db/installed"
_OF_RPM = ("usr/lib/sysimage/rpm/rpmdb.sqlite", "var/lib/rpm/rpmdb.sqlite")

MAX_RPM_BYTES = 100_000_000
_MAX_FILES = 2_000_000
_MAX_ENTRIES = 65_535
_DIRINDEXES, _BASENAMES, _DIRNAMES = 1116, 1117, 1118
_INT32, _STRING_ARRAY = 4, 8
_TAGS = {(_BASENAMES, _STRING_ARRAY), (_DIRNAMES, _STRING_ARRAY), (_DIRINDEXES, _INT32)}
_ENTRY = struct.Struct(">iIiI")
_COUNTS = struct.Struct(">II")
_STEPS = 100_000
_MAX_INTERVALS = 1000
"""Maximum number of intervals of `_STEPS` steps. A table of a million rows needs fewer."""
_ROLLBACK = b"\1\1"
"""File format versions without a write-ahead log, which a database in memory cannot have."""
_SELECT = "SELECT blob FROM main.Packages WHERE typeof(blob) = 'blob'"
_IS_TABLE = "SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = 'Packages' AND rootpage > 0"


def recorded(paths: Iterable[str]) -> frozenset[str]:
    """Return the files named by the package records among these paths, relative to the working directory."""
    return frozenset(name for path in paths for name in _named(path))


def _named(path: str) -> Iterator[str]:
    if path.startswith(_OF_DPKG) and path.endswith(".list"):
        yield from (line.strip("/") for line in text_of(path).splitlines())
    elif path == _OF_APK or path == f"usr/{_OF_APK}":
        folder = ""
        for line in text_of(path).splitlines():
            if line.startswith("F:"):
                folder = line[2:]
            elif line.startswith("R:"):
                yield posixpath.join(folder, line[2:])
    elif path in _OF_RPM:
        yield from files_of(_data_of(path, MAX_RPM_BYTES))
    elif path.endswith(".dist-info/RECORD"):
        site = posixpath.dirname(posixpath.dirname(path))
        with contextlib.suppress(csv.Error):
            for row in csv.reader(text_of(path).splitlines()):
                if row:
                    yield posixpath.normpath(posixpath.join("/", site, row[0])).strip("/")


def text_of(path: str, max_bytes: int = _MAX_BYTES) -> str:
    """Return the text of a file that the policy can have written; empty if it is unreadable or too large."""
    return _data_of(path, max_bytes).decode("utf-8", "surrogateescape")


def _data_of(path: str, max_bytes: int) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError:
        return b""
    return data if len(data) <= max_bytes else b""


def files_of(data: bytes) -> Iterator[str]:
    """Yield the recorded paths, without a leading slash. Yields nothing if the database cannot be read."""
    files = itertools.chain.from_iterable(map(_files, _bounded(_headers(data), len(data))))
    return itertools.islice(files, _MAX_FILES)


def _bounded(headers: Iterator[bytes], n_bytes: int) -> Iterator[bytes]:
    """Yield headers while their total size is at most the database's; forged ones can overlap."""
    for header in headers:
        n_bytes -= len(header)
        if n_bytes < 0:
            return
        yield header


def _headers(data: bytes) -> Iterator[bytes]:
    if sqlite3 is None or not hasattr(sqlite3.Connection, "deserialize"):
        return
    intervals = itertools.count()
    with contextlib.closing(sqlite3.connect(":memory:")) as database, contextlib.suppress(sqlite3.Error, ValueError):
        # a column can be an expression
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, len(data))
        database.deserialize(data[:18] + _ROLLBACK + data[20:])
        database.execute("PRAGMA trusted_schema = OFF")
        database.execute("PRAGMA query_only = ON")
        database.set_progress_handler(lambda: next(intervals) >= _MAX_INTERVALS, _STEPS)
        if database.execute(_IS_TABLE).fetchone():
            for (header,) in database.execute(_SELECT):
                yield header


def _files(header: bytes) -> Iterator[str]:
    try:
        n_entries, n_bytes = _COUNTS.unpack_from(header)
        store = _COUNTS.size + n_entries * _ENTRY.size
        if n_entries > _MAX_ENTRIES or store + n_bytes > len(header):
            return
        entries = [_ENTRY.unpack_from(header, _COUNTS.size + n * _ENTRY.size) for n in range(n_entries)]
        entries_by_tag = {
            tag: (offset, count) for tag, kind, offset, count in entries if (tag, kind) in _TAGS and offset >= 0
        }
        names, folders = (_strings(header, store, *entries_by_tag[tag]) for tag in (_BASENAMES, _DIRNAMES))
        offset, count = entries_by_tag[_DIRINDEXES]
        indexes = struct.unpack_from(f">{count}I", header, store + offset)
    except (struct.error, KeyError, MemoryError):
        return
    for name, index in zip(names, indexes, strict=False):
        if index < len(folders):
            yield posixpath.normpath(posixpath.join("/", folders[index], name)).strip("/")


def _strings(header: bytes, store: int, offset: int, count: int) -> list[str]:
    if count > len(header):
        return []
    parts = header[store + offset :].split(b"\0", count)
    return [part.decode("utf-8", "surrogateescape") for part in parts[:count]]
