"""How others choose an engine, in the same seat: ProRL Agent's counter, and round-robin per call.

Both know only what they gave out, never what came back. When an engine fails, they go on to the next they would choose.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Protocol, TypeVar

from farm.errors import EngineError
from workers.policy.generation import Engine
from workers.policy.pool import EnginePool, Seat, Wish

T = TypeVar("T")
_TRIES = 50
_PAUSE_S = 0.05


class Chooser(Protocol):
    """Gives every rollout a seat."""

    def seat(self, wish: Wish) -> Seat | PeerSeat: ...

    def added(self, engine: Engine) -> None: ...


class PeerSeat:
    """One rollout's way to the engines, as a `Seat`."""

    blocked = ""
    newest_version = ""
    paused_s = 0.0

    def __init__(self, choose: Callable[[], Engine], sticky: bool) -> None:
        self._choose = choose
        self._sticky = sticky
        self._engine = choose() if sticky else None

    def version_of(self, url: str) -> str:
        return ""

    async def call(self, n_tokens: int, ask: Callable[[Engine], Awaitable[T]]) -> T:
        for _ in range(_TRIES):
            engine = self._engine or self._choose()
            try:
                return await ask(engine)
            except EngineError:
                if self._sticky:
                    self._engine = self._choose()
                await asyncio.sleep(_PAUSE_S)
        raise EngineError(f"{_TRIES} tries failed")


class Counter:
    """A heap of [assignments ever made, engine]: each rollout takes the smallest and stays there."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._numbers = count()
        self._heap = [(0, next(self._numbers), engine) for engine in engines]

    def seat(self, wish: Wish) -> PeerSeat:
        return PeerSeat(self._next, sticky=True)

    def added(self, engine: Engine) -> None:
        heapq.heappush(self._heap, (0, next(self._numbers), engine))

    def _next(self) -> Engine:
        n, _, engine = heapq.heappop(self._heap)
        heapq.heappush(self._heap, (n + 1, next(self._numbers), engine))
        return engine


class RoundRobin:
    """The next engine for each call."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = list(engines)
        self._numbers = count()

    def seat(self, wish: Wish) -> PeerSeat:
        return PeerSeat(self._next, sticky=False)

    def added(self, engine: Engine) -> None:
        self._engines.append(engine)

    def _next(self) -> Engine:
        return self._engines[next(self._numbers) % len(self._engines)]


class Ours:
    """The farm's own pool."""

    def __init__(self, pool: EnginePool, added: Callable[[Engine], None]) -> None:
        self._pool = pool
        self._added = added

    def seat(self, wish: Wish) -> Seat:
        return self._pool.seat(wish)

    def added(self, engine: Engine) -> None:
        self._added(engine)
