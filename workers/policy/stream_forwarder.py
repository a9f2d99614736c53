"""Streaming of an answer while it is sampled, up to a stop string.

Sent deltas cannot be revoked, so only this answer may follow them. The ids keep a stop string, as sampled; the visible
message ends before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from workers.plugins.interfaces import Delta, OnDelta
from workers.policy.generation import EngineRefused
from workers.policy.tokens.tokenizer import Tokenizer
from workers.policy.tool_calls import Parser
from workers.policy.tool_calls.scanner import any_of, held_from


def before_stop(text: str, reason: str | int | None, stops: Sequence[str]) -> str:
    """Return the text up to `reason`, the stop string that ended it; all of it if none did."""
    if not reason or not isinstance(reason, str) or reason not in stops:
        return text
    head, result, _ = text.rpartition(reason)
    return head if result else text


class StopStream:
    """Filters streamed text: holds back what may become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def feed(self, text: str) -> str:
        """Add text, and return the part that can be passed on now."""
        self._held += text
        if not self._stops:
            return self._give(len(self._held))
        # A longer one may have begun before a complete one.
        n = held_from(self._held, 0, self._stops)
        match = any_of(self._stops).search(self._held)
        return self._give(min(n, match.start()) if match else n)

    def end(self, reason: str | int | None) -> str:
        """Return the rest, up to the stop string that ended it."""
        return before_stop(self._give(len(self._held)), reason, self._stops)

    def _give(self, n: int) -> str:
        result, self._held = self._held[:n], self._held[n:]
        return result


class Interrupted(EngineRefused):
    """A stream broke off after its beginning was sent; the client may retry."""

    retryable = True


class StreamForwarder:
    """One answer on its way to the client."""

    def __init__(self, tokenizer: Tokenizer, parser: Parser, stops: Sequence[str], on_delta: OnDelta) -> None:
        self.begun = False
        self._broken = False
        self._text = tokenizer.stream()
        self._stops = StopStream(stops)
        self._splitter = parser.stream()
        self._on_delta = on_delta

    @contextmanager
    def part(self) -> Iterator[None]:
        """Surround the sampling of a part. Raises Interrupted if an earlier part broke off, as its ids are lost."""
        if self._broken:
            raise Interrupted("the answer broke off after its beginning was passed on; ask again")
        yield
        self._broken = False

    def feed(self, ids: Sequence[int]) -> None:
        self.begun = self._broken = True
        self._pass_on(self._splitter.feed(self._stops.feed(self._text.feed(ids))))

    def end(self, reason: str | int | None) -> None:
        """Send the rest, once the answer has ended for `reason`."""
        rest = self._stops.feed(self._text.end()) + self._stops.end(reason)
        self._pass_on(self._splitter.feed(rest))
        self._pass_on(self._splitter.end())

    def _pass_on(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._on_delta(delta)
