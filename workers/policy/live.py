"""Passes an answer on while it is sampled. What was passed on cannot be taken back, so no other may follow it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from workers.interfaces import Delta, OnDelta
from workers.policy.generation import EngineRefused
from workers.policy.parsing import Parser
from workers.policy.stops import StopStream
from workers.policy.tokens.tokenizer import Tokenizer


class Interrupted(EngineRefused):
    """A stream that broke after its beginning was passed on; the client may ask again."""

    retryable = True


class Live:
    """One answer on its way to whoever waits for it."""

    def __init__(self, tokenizer: Tokenizer, parser: Parser, stops: Sequence[str], on_delta: OnDelta) -> None:
        self.begun = False
        self._broken = False
        self._text = tokenizer.stream()
        self._stops = StopStream(stops)
        self._splitter = parser.stream()
        self._on_delta = on_delta

    @contextmanager
    def part(self) -> Iterator[None]:
        """While a part is sampled. Raises Interrupted if an earlier one broke off: what it began is lost."""
        if self._broken:
            raise Interrupted("the answer broke off after its beginning was passed on; ask again")
        yield
        self._broken = False

    def feed(self, ids: Sequence[int]) -> None:
        self.begun = self._broken = True
        self._pass_on(self._splitter.feed(self._stops.feed(self._text.feed(ids))))

    def end(self, reason: str | int | None) -> None:
        """The rest, once the answer has ended, and why it did."""
        rest = self._stops.feed(self._text.end()) + self._stops.end(reason)
        self._pass_on(self._splitter.feed(rest))
        self._pass_on(self._splitter.end())

    def _pass_on(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._on_delta(delta)
