"""The head and the tail of a stream of bytes, in bounded memory: what of a long output a model is shown."""

from __future__ import annotations


def gap(n_dropped: int) -> bytes:
    """The line in place of bytes that are left out."""
    return b"\n[... %d bytes left out ...]\n" % n_dropped


class HeadTail:
    """Keeps the first and the last `limit / 2` bytes and counts what it drops between them."""

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
        """Return what was kept, with a line in place of what was not."""
        dropped = self.n_dropped
        return bytes(self._head) + (gap(dropped) if dropped else b"") + bytes(self._tail[-self._room :])

    def text(self) -> str:
        """The same as text; bytes that are no UTF-8 are replaced."""
        return self.data().decode("utf-8", errors="replace")
