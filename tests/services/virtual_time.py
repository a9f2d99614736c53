"""An event loop whose clock jumps to the next due event: hours of waiting pass at once, deterministically."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_END_S = 30_000.0


class _Selector(selectors.DefaultSelector):
    """Instead of sleeping, moves the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        result = super().select(0)
        if result or timeout == 0:
            return result
        if timeout is None:
            raise AssertionError("everybody waits, and nothing is left that could happen")
        self.now += timeout
        if self.now > _END_S:
            raise AssertionError("hours have passed, and it has not ended")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """For code that takes its time from the loop, and waits for nothing outside it."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
