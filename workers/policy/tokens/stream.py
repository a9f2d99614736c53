"""Ids to text as they come: never half a character, and at a cost that does not grow with what was decoded before.

How an id reads can depend on its neighbours (a leading space that decoders cut at the very start, a character spread
over several ids), so a few ids before are always decoded along, and only what they add is given out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
# So many ids without one whole character are no text that is still to be completed; they are given out as they are.
_LONGEST_WAIT = 256
_NEIGHBOURS = 8

Decode = Callable[[list[int]], str]


class IdStream:
    """One stream. End-of-turn ids are no text, so they are left out."""

    def __init__(self, decode: Decode, left_out: frozenset[int] = frozenset()) -> None:
        self._decode = decode
        self._left_out = left_out
        self._window: list[int] = []
        self._n_before = 0
        self._sent = 0

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is complete now and was not given before."""
        self._window += [token for token in map(int, ids) if token not in self._left_out]
        text = self._decode(self._window)
        whole = text.rstrip(_REPLACEMENT)
        if len(whole) < len(text) and len(self._window) - self._n_before <= _LONGEST_WAIT:
            return self._give(whole)
        new = self._give(text)
        self._move()
        return new

    def end(self) -> str:
        """What is left, incomplete characters as U+FFFD."""
        return self._give(self._decode(self._window))

    def _give(self, text: str) -> str:
        new = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return new

    def _move(self) -> None:
        """Keep the ids since the last whole character but one, as the neighbours of what comes."""
        del self._window[: self._n_before]
        self._window = self._window[-self._n_neighbours() :]
        self._n_before = len(self._window)
        self._sent = len(self._decode(self._window))

    def _n_neighbours(self) -> int:
        """A few of what came in one large piece; as many as make whole characters."""
        for count in range(_NEIGHBOURS, min(len(self._window), 2 * _NEIGHBOURS)):
            if _REPLACEMENT not in self._decode(self._window[-count:]):
                return count
        return len(self._window)
