"""The output of a remotely watched process: its last bytes, in the order they were read, by offset."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_KEPT = 1_000_000
"""Maximum size of one process's output that is kept, in bytes."""
MAX_TAKEN = 500_000
"""Size of a read in bytes, plus the rest of a piece."""


@dataclass(frozen=True, slots=True)
class LoggedPiece:
    """Bytes of one stream; `start` is the offset of the first byte."""

    start: int
    stream: str
    data: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.data)


class OutputLog:
    """All streams of a process in one sequence of bytes; `first` is the oldest kept offset, `end` the next new one."""

    def __init__(self) -> None:
        self.first = self.end = 0
        self._pieces: deque[LoggedPiece] = deque()

    def add(self, stream: str, data: bytes) -> None:
        """Add bytes; the oldest are dropped."""
        self._pieces.append(LoggedPiece(self.end, stream, data))
        self.end += len(data)
        while self.end - self._pieces[0].end >= MAX_KEPT:
            self._pieces.popleft()
        self.first = self._pieces[0].start

    def taken(self, after: int) -> tuple[list[LoggedPiece], int]:
        """Return the pieces from an offset on, up to the size of a read, and the offset of the next byte."""
        result: list[LoggedPiece] = []
        place = max(after, self.first)
        for piece in self._pieces:
            if piece.end <= place:
                continue
            if place - max(after, self.first) >= MAX_TAKEN:
                break
            result.append(LoggedPiece(place, piece.stream, piece.data[place - piece.start :]))
            place = piece.end
        return result, max(place, after)
