"""Routers that choose an engine as other systems do: ProRL Agent's counter, and round-robin per call.

Both know only their assignments, not the ends of calls. When an engine fails, they use the next in their order.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Protocol, TypeVar

from farm.errors import EngineError
from workers.policy.generation import Engine
from workers.policy.routing.pool import EnginePool
from workers.policy.routing.router import Call, RoutingKey, StickyRouter

T = TypeVar("T")
_TRIES = 50
_PAUSE_S = 0.05


class LoadBalancer(Protocol):
    """Assigns a router to every rollout."""

    def router(self, routing_key: RoutingKey) -> StickyRouter | PeerRouter: ...

    def added(self, engine: Engine) -> None: ...


class PeerRouter:
    """One rollout's access to the engines, with the interface of `StickyRouter`."""

    blocked = ""
    newest_version = ""
    paused_s = 0.0

    def __init__(self, choose: Callable[[], Engine], sticky: bool) -> None:
        self._choose = choose
        self._sticky = sticky
        self._engine = choose() if sticky else None

    def version_of(self, url: str) -> str:
        return ""

    @asynccontextmanager
    async def acquire(self, call: Call) -> AsyncIterator[Engine]:
        try:
            yield self._engine or self._choose()
        except EngineError:
            call.tries = replace(call.tries, n_failures=call.tries.n_failures + 1)
            if call.tries.n_failures >= _TRIES:
                raise
            if self._sticky:
                self._engine = self._choose()
            await asyncio.sleep(_PAUSE_S)

    async def answer(self, call: Call, ask: Callable[[Engine], Awaitable[T]]) -> T:
        while True:
            async with self.acquire(call) as engine:
                return await ask(engine)


class Counter:
    """A heap of [total assignments, engine]: each rollout takes the smallest and stays there."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._numbers = count()
        self._heap = [(0, next(self._numbers), engine) for engine in engines]

    def router(self, routing_key: RoutingKey) -> PeerRouter:
        return PeerRouter(self._next, sticky=True)

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

    def router(self, routing_key: RoutingKey) -> PeerRouter:
        return PeerRouter(self._next, sticky=False)

    def added(self, engine: Engine) -> None:
        self._engines.append(engine)

    def _next(self) -> Engine:
        return self._engines[next(self._numbers) % len(self._engines)]


class Ours:
    """The farm's own pool."""

    def __init__(self, pool: EnginePool, added: Callable[[Engine], None]) -> None:
        self._pool = pool
        self._added = added

    def router(self, routing_key: RoutingKey) -> StickyRouter:
        return StickyRouter(self._pool, routing_key)

    def added(self, engine: Engine) -> None:
        self._added(engine)
