"""Streaming of ids as text: never half a character, at a cost independent of the text decoded before.

The text of an id can depend on its neighbours (a leading space that decoders drop at the very start, a character spread
over several ids), so a few previous ids are always decoded along, and only the text after theirs is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
# So many ids without a complete character will not become text; they are returned undecoded.
_MAX_WAIT = 256
_NEIGHBOURS = 8

Decode = Callable[[list[int]], str]


class IdStream:
    """The decoder of one stream of ids. End-of-turn ids are not text and are omitted."""

    def __init__(self, decode: Decode, left_out: frozenset[int] = frozenset()) -> None:
        self._decode = decode
        self._left_out = left_out
        self._window: list[int] = []
        self._n_before = 0
        self._sent = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Return the newly completed text."""
        self._window += [token for token in map(int, ids) if token not in self._left_out]
        text = self._decode(self._window)
        whole = text.rstrip(_REPLACEMENT)
        if len(whole) < len(text) and len(self._window) - self._n_before <= _MAX_WAIT:
            return self._give(whole)
        new = self._give(text)
        self._move()
        return new

    def end(self) -> str:
        """Return the remaining text, incomplete characters as U+FFFD."""
        return self._give(self._decode(self._window))

    def _give(self, text: str) -> str:
        new = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return new

    def _move(self) -> None:
        """Keep the last few ids as the neighbours of the next ones."""
        del self._window[: self._n_before]
        self._window = self._window[-self._n_neighbours() :]
        self._n_before = len(self._window)
        self._sent = len(self._decode(self._window))

    def _n_neighbours(self) -> int:
        """Return how many ids to keep: the fewest that make whole characters, from a few on."""
        for count in range(_NEIGHBOURS, min(len(self._window), 2 * _NEIGHBOURS)):
            if _REPLACEMENT not in self._decode(self._window[-count:]):
                return count
        return len(self._window)
