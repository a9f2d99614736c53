"""The undo history of the `edit` tool: each change stores the removed bytes, not a copy of the file."""

from __future__ import annotations

import hashlib
import posixpath
from dataclasses import dataclass

MAX_CHANGES = 200
MAX_BYTES = 4_000_000
"""Maximum removed bytes kept for all files of a rollout: a node runs hundreds of rollouts."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change: `removed` are the old bytes at `offset`, None if there was no file; `n_inserted` bytes replace them."""

    path: str
    offset: int
    removed: bytes | None
    n_inserted: int
    after: bytes
    """The digest of the file after the change: a different one means that another program wrote to it."""

    def left(self, data: bytes) -> bool:
        """Return whether this is the file as the change left it."""
        return digest(data) == self.after

    def undone(self, data: bytes) -> bytes:
        """Return the file before the change; `data` must be the file as the change left it."""
        return data[: self.offset] + (self.removed or b"") + data[self.offset + self.n_inserted :]


class History:
    """The latest changes of all files; beyond the limits the oldest are dropped."""

    def __init__(self, max_changes: int = MAX_CHANGES, max_bytes: int = MAX_BYTES) -> None:
        self._max_changes = max_changes
        self._max_bytes = max_bytes
        self._changes: list[Change] = []

    def add(self, change: Change) -> None:
        """Add a change; one that exceeds the limits drops its file's history instead."""
        if len(change.removed or b"") > self._max_bytes:
            self.forget(change.path)
            return
        self._changes.append(change)
        while len(self._changes) > self._max_changes or self.n_bytes > self._max_bytes:
            del self._changes[0]

    def last(self, path: str) -> Change | None:
        """Return the latest change of a file that is not undone, if it is still held."""
        return next((change for change in reversed(self._changes) if _same(change.path, path)), None)

    def drop(self, change: Change) -> None:
        """Drop a change that was undone."""
        self._changes.remove(change)

    def forget(self, path: str) -> None:
        """Drop all changes of a file whose latest change cannot be undone: then the earlier ones cannot be either."""
        self._changes = [change for change in self._changes if not _same(change.path, path)]

    @property
    def n_bytes(self) -> int:
        return sum(len(change.removed or b"") for change in self._changes)


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _same(path: str, other: str) -> bool:
    # POSIX keeps two slashes at the beginning of a path.
    return posixpath.normpath(path).lstrip("/") == posixpath.normpath(other).lstrip("/")
