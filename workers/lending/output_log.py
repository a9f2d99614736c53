"""The output of a process that is watched from afar: the last of it, in the order it was read, by byte offsets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_KEPT = 1_000_000
"""Bytes of one process that are kept."""
MAX_TAKEN = 500_000
"""Bytes, and the rest of a piece, that are taken at a time."""


@dataclass(frozen=True, slots=True)
class LoggedPiece:
    """Bytes of one stream; `start` is the offset of the first."""

    start: int
    stream: str
    data: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.data)


class OutputLog:
    """All streams of a process in one row of bytes; `first` is the offset of the oldest kept one, `end` of the next."""

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
        """Return the pieces from an offset on, as many as are taken at a time, and the offset of the next byte."""
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
