"""Streaming of an answer while it is sampled. Sent deltas cannot be revoked, so only this answer may follow them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from workers.plugins.interfaces import Delta, OnDelta
from workers.policy.generation import EngineRefused
from workers.policy.stop_strings import StopStream
from workers.policy.tokens.tokenizer import Tokenizer
from workers.policy.tool_calls import Parser


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
