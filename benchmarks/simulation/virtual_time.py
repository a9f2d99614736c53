"""Virtual time: a queue of timed events, with a clock that stands still while one is handled."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class VirtualTime:
    """Seconds since the start of a simulation; call it to read the clock."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def __call__(self) -> float:
        return self._now

    def at(self, instant: float, event: Callable[[], None]) -> None:
        """Schedule an event; events at the same time are handled in the order of their addition."""
        heapq.heappush(self._events, (instant, next(self._order), event))

    def step(self) -> bool:
        """Handle the next event; return False if there is none."""
        if not self._events:
            return False
        instant, _, event = heapq.heappop(self._events)
        self._now = max(self._now, instant)
        event()
        return True
