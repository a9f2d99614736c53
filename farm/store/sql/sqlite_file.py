"""The file of a SQLite store: its identity, and the process that holds its write lock.

An open connection continues on a file that was removed or replaced, and a new connection creates an empty file. So a
store remembers the file that it opened first, and uses no other.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from farm.errors import StoreGone

_WRITE_LOCK = "120"
"""The byte in a WAL's shared memory that a writer locks: https://sqlite.org/walformat.html#wal_locks"""


class SqliteFile:
    """The file at a path, from its first opening on."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).absolute()
        self._known: tuple[int, int] | None = None

    def opened(self) -> None:
        """Remember the identity of the file, the first time."""
        if self._known is None:
            self._known = self._found()

    def check(self) -> None:
        """Raise StoreGone if the opened file is no longer at its path."""
        if self._known is None or self._found() == self._known:
            return
        what = "replaced by another" if self.path.exists() else "removed"
        raise StoreGone(
            f"the database file {self.path} was {what} while it was in use: end this process, put the file back, start "
            "again"
        )

    def _found(self) -> tuple[int, int] | None:
        try:
            result = os.stat(self.path)  # noqa: PTH116 - it is called at every statement
        except OSError:
            return None
        return result.st_dev, result.st_ino

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
