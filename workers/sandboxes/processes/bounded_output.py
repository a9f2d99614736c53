"""The head and tail of a byte stream in bounded memory, for long output that is shown to a model."""

from __future__ import annotations


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
