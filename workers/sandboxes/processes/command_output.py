"""Output in bounded memory: the head and tail of a byte stream for display, and more of a command's output on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO

SHOWN = 200_000
"""Maximum size of an output that is returned, in bytes."""
KEPT = 4_000_000
"""Maximum size of longer output that is kept on disk, in bytes."""


def gap(n_dropped: int) -> bytes:
    """Return the line that replaces omitted bytes."""
    return b"\n[... %d bytes left out ...]\n" % n_dropped


class HeadTail:
    """Keeps the first and last `limit / 2` bytes and counts the bytes dropped in between."""

    def __init__(self, limit: int) -> None:
        self._room = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self._n_seen = 0

    def add(self, chunk: bytes) -> None:
        self._n_seen += len(chunk)
        fits = self._room - len(self._head)
        if fits > 0:
            self._head += chunk[:fits]
            chunk = chunk[fits:]
        self._tail += chunk
        if len(self._tail) > 2 * self._room:
            del self._tail[: -self._room]

    @property
    def n_dropped(self) -> int:
        return self._n_seen - len(self._head) - min(len(self._tail), self._room)

    def data(self) -> bytes:
        """Return the kept bytes, with a line in place of the dropped ones."""
        dropped = self.n_dropped
        return bytes(self._head) + (gap(dropped) if dropped else b"") + bytes(self._tail[-self._room :])

    def text(self) -> str:
        """Return `data` as text; invalid UTF-8 is replaced."""
        return self.data().decode("utf-8", errors="replace")


class CommandOutput:
    """Shows at most `shown` bytes (at least 2) and keeps at most `kept`; of longer output, head and tail."""

    def __init__(self, folder: Path, shown: int = SHOWN, kept: int = KEPT) -> None:
        self._shown = HeadTail(shown)
        self._limit = shown // 2 * 2
        self._kept = kept
        self._folder = folder
        self._file: _Spool | None = None
        self._full_disk = False
        self.n_bytes = 0

    def add(self, chunk: bytes) -> None:
        self.n_bytes += len(chunk)
        if self.n_bytes > self._limit and not self._full_disk:
            self._keep(chunk)
        self._shown.add(chunk)

    def _keep(self, chunk: bytes) -> None:
        try:
            if self._file is None:
                self._file = _Spool(self._kept, self._folder)
                # nothing was dropped until now
                self._file.add(self._shown.data())
            self._file.add(chunk)
        except OSError:
            self._full_disk = True
            self.close()

    @property
    def n_dropped(self) -> int:
        return self._shown.n_dropped

    def data(self) -> bytes:
        """Return the output for display."""
        return self._shown.data()

    def full(self) -> bytes | None:
        """Return the kept output; None if `data` shows all of it, or if the disk file failed."""
        try:
            return None if self._file is None else self._file.data()
        except OSError:
            return None

    def close(self) -> None:
        """Free the disk space. Harmless when repeated."""
        if self._file is not None:
            self._file.close()
            self._file = None


class _Spool:
    """An unnamed file: the head, then a ring buffer of the same size."""

    def __init__(self, limit: int, folder: Path) -> None:
        self._room = max(1, limit // 2)
        self._n_seen = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - see close

    def add(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        fits = max(0, self._room - self._n_seen)
        self._write(self._n_seen, view[:fits])
        self._n_seen += len(view)
        # data longer than the ring: only the last part of its size is kept
        rest = view[fits:][-self._room :]
        if rest:
            start = (self._n_seen - self._room - len(rest)) % self._room
            first = rest[: self._room - start]
            self._write(self._room + start, first)
            self._write(self._room, rest[len(first) :])

    def _write(self, offset: int, view: memoryview) -> None:
        self._file.seek(offset)
        while view:
            view = view[self._file.write(view) :]

    def data(self) -> bytes:
        self._file.seek(0)
        whole = self._file.read(2 * self._room)
        n_dropped = self._n_seen - 2 * self._room
        if n_dropped <= 0:
            return whole
        start = self._room + self._n_seen % self._room
        return whole[: self._room] + gap(n_dropped) + whole[start:] + whole[self._room : start]

    def close(self) -> None:
        self._file.close()
