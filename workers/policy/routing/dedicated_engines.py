"""Dedicated engines: LLM servers that batches or instances bring along, each with its own pool.

A pool exists while rollouts use it; they share its probe, its health checks and its circuit breaker. Its record names
no weights, so that weight updates of the farm do not hold its calls back, and it reports nothing to the store. The
capabilities of recently used engines are kept, so that consecutive batches do not probe them again.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from farm.records.engine import EngineInfo
from workers.policy.engines import detect
from workers.policy.generation import EngineAddress
from workers.policy.routing.backend import EngineReporter, OpenEngine, record_of
from workers.policy.routing.engine_monitor import Detect
from workers.policy.routing.pool import EnginePool

_N_KNOWN = 1024
"""Maximum number of engines whose capabilities are kept."""
_CHECK_S = 3.0
_RARELY_S = 3600.0
"""The period of health checks of a plain-chat engine; one that fails a call is checked at once."""


@dataclass(slots=True)
class _Shared:
    pool: EnginePool
    n_users: int = 0


class DedicatedEngines:
    """The dedicated engines of a worker process, for one event loop; `call` schedules a function on that loop.

    `away_s` is the time that a call waits for an ejected engine.
    """

    def __init__(
        self,
        call: Callable[[Callable[[], Any]], object],
        open_engine: OpenEngine,
        *,
        detect: Detect = detect,
        away_s: float = 60.0,
        n_known: int = _N_KNOWN,
    ) -> None:
        self._call = call
        self._open = open_engine
        self._detect = detect
        self._away_s = away_s
        self._n_known = n_known
        self._lock = threading.Lock()
        self._shared: dict[EngineAddress, _Shared] = {}
        self._known: OrderedDict[EngineAddress, EngineInfo] = OrderedDict()
        self._closing: set[asyncio.Future[None]] = set()

    @contextmanager
    def pool(self, address: EngineAddress) -> Iterator[EnginePool]:
        """Yield the pool of one engine, shared by all its users and closed after the last. Thread-safe."""
        with self._lock:
            shared = self._shared.setdefault(address, _Shared(self._opened(address)))
            shared.n_users += 1
        try:
            yield shared.pool
        finally:
            with self._lock:
                shared.n_users -= 1
                if not shared.n_users:
                    del self._shared[address]
                    self._call(lambda: self._close(shared.pool))

    async def aclose(self) -> None:
        """Close all pools, even those in use."""
        # Pools released a moment ago are about to be closed.
        await asyncio.sleep(0)
        for shared in list(self._shared.values()):
            self._close(shared.pool)
        await asyncio.gather(*self._closing)

    def _opened(self, address: EngineAddress) -> EnginePool:
        if address in self._known:
            self._known.move_to_end(address)
        # The record does not have all settings of the address.
        record = record_of(address, _plain(address) if address.plain_chat else self._known.get(address))
        return EnginePool(
            lambda: (record,),
            open_engine=lambda _, info: self._open(address, info),
            detect=lambda _, timeout_s: self._find_out(address, timeout_s),
            reporter=_InfoKeeper(self, address),
            check_s=_RARELY_S if address.plain_chat else _CHECK_S,
            away_s=self._away_s,
        )

    async def _find_out(self, address: EngineAddress, timeout_s: float) -> EngineInfo:
        return _plain(address) if address.plain_chat else await self._detect(address, timeout_s)

    def _close(self, pool: EnginePool) -> None:
        closing = asyncio.ensure_future(pool.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def keep(self, address: EngineAddress, info: EngineInfo) -> None:
        """Keep the capabilities of an engine; the least recently used ones are dropped."""
        with self._lock:
            self._known[address] = info
            self._known.move_to_end(address)
            if len(self._known) > self._n_known:
                self._known.popitem(last=False)

    def forget(self, address: EngineAddress) -> None:
        """Probe an engine again at its next use: a server that returns may be another one."""
        with self._lock:
            self._known.pop(address, None)


class _InfoKeeper(EngineReporter):
    """A reporter that keeps an engine's capabilities in its process, until the engine fails."""

    def __init__(self, engines: DedicatedEngines, address: EngineAddress) -> None:
        self._engines = engines
        self._address = address

    def report_info(self, url: str, info: EngineInfo) -> None:
        self._engines.keep(self._address, info)

    def report_failure(self, url: str, why: str) -> None:
        if why:
            self._engines.forget(self._address)


def _plain(address: EngineAddress) -> EngineInfo:
    """Return the capabilities of an engine that is not probed."""
    return EngineInfo(kind="openai", model=address.model)
