"""The engines of a worker process: their list, their load and health, and their calls.

Dedicated engines are LLM servers that batches or instances bring along, each with its own pool. It exists while
rollouts use it; they share its probe, its health checks and its circuit breaker. Its record names no weights, so that
weight updates of the farm do not hold its calls back, and it reports nothing to the store. The capabilities of recently
used engines are kept, so that consecutive batches do not probe them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from farm.errors import EngineError
from farm.records.engine import EngineInfo
from farm.records.engine_state import EngineUse, StoredEngine, is_reserved
from farm.records.trajectory import version_number
from workers.policy.engines import detect, open_engine
from workers.policy.generation import (
    Engine,
    EngineAddress,
    EngineBusy,
    EngineRefused,
    EngineUnfit,
    ExpertsMissing,
    ImagesRefused,
)
from workers.policy.routing.backend import (
    Backend,
    CallAborted,
    EngineHealth,
    EngineReporter,
    OpenEngine,
    SharedEngine,
    record_of,
)
from workers.policy.routing.engine_monitor import Detect, Monitor
from workers.policy.routing.load import Candidate, LoadTracker, PeerLoads

_SLACK = 2.0
_SLOW_TOKENS_S = 20.0
"""The assumed speed, in tokens/s, of an engine without an answered call."""
_N_KNOWN = 1024
"""Maximum number of engines whose capabilities are kept."""
_CHECK_S = 3.0
_RARELY_S = 3600.0
"""The period of health checks of a plain-chat engine; one that fails a call is checked at once."""


class EnginePool:
    """The engines of a worker process, for one event loop at a time.

    `list_engines` returns the listed engines. It runs before each call, so it must be fast; call `changed` when its
    result changes. A call waits `none_s` seconds if no engine is listed, `weights_s` if none has the farm's weights,
    and `away_s` while all are ejected.
    """

    def __init__(
        self,
        list_engines: Callable[[], Sequence[StoredEngine]],
        *,
        open_engine: OpenEngine = open_engine,
        detect: Detect = detect,
        reporter: EngineReporter | None = None,
        others: PeerLoads | None = None,
        check_s: float = 3.0,
        none_s: float = 30.0,
        weights_s: float = 60.0,
        away_s: float = math.inf,
    ) -> None:
        self.reporter = reporter or EngineReporter()
        self.load_tracker = LoadTracker(others)
        self.none_s = none_s
        self.weights_s = weights_s
        self.away_s = away_s
        self._list_engines = list_engines
        self._open = open_engine
        self._backends: dict[str, Backend] = {}
        self._seen: tuple[StoredEngine, ...] | None = None
        self._monitor = Monitor(self, detect, check_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def newest_version(self) -> str:
        """The newest version ordered for any shared engine; empty if there is none."""
        shared = (listed for listed in self._list_engines() if not is_reserved(listed.model))
        return max((listed.version for listed in shared), key=version_number, default="")

    def version_of(self, url: str) -> str:
        return self._backends[url].record.engine_version if url in self._backends else ""

    async def start(self) -> None:
        """Start the monitor. The first call does so, too; this is for idle workers, which need the monitor as well."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._forget_loop()
            self._loop = loop
            self._monitor.start()
            self.sync()

    async def aclose(self) -> None:
        """Stop the monitor and close the connections that this event loop opened. Idempotent."""
        if self._loop is not asyncio.get_running_loop():
            return
        await self._monitor.stop()
        clients = [backend.client for backend in self._backends.values() if backend.client is not None]
        self._forget_loop()
        for client in clients:
            await client.aclose()

    def _forget_loop(self) -> None:
        self._loop = None
        self._waiters = set()
        for backend in self._backends.values():
            backend.client = None

    def changed(self) -> None:
        """Schedule a sync with the changed list. Thread-safe."""
        loop = self._loop
        if loop is not None:
            # A closed event loop has no waiting calls.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.sync)

    def sync(self) -> None:
        """Add, update and remove backends by the current list."""
        now = tuple(self._list_engines())
        if now == self._seen:
            return
        first, self._seen = self._seen is None, now
        listed = {each.url: each for each in now}
        for url in self._backends.keys() - listed.keys():
            backend = self._backends.pop(url)
            if backend.frozen:
                # It will not be resumed.
                backend.abort_calls("is no longer listed", died=False)
            backend.drop_client()
            self._monitor.forget(url)
            self.load_tracker.forget(url)
        for url, each in listed.items():
            if url not in self._backends:
                # Engines listed before this process began are not new to the farm.
                self._backends[url] = Backend(each, EngineHealth(None if first else self.now()))
            elif self._backends[url].update(each):
                self._monitor.doubt(self._backends[url])
        for backend in self._backends.values():
            has_control = backend.info is not None and backend.info.control
            if backend.record.paused == "abort" and not has_control:
                backend.abort_calls("is paused for new weights", died=False)
        self.report()
        self._monitor.look()
        self.wake()

    def report(self) -> None:
        """Report the calls in flight, and the orders that this process follows."""
        in_flight: dict[str, EngineUse] = {}
        for url, backend in self._backends.items():
            load = self.load_tracker.own(url)
            in_flight[url] = EngineUse(backend.record.n_orders, load.n_calls, load.n_tokens)
        self.reporter.report(in_flight)

    @property
    def backends(self) -> Sequence[Backend]:
        return list(self._backends.values())

    def now(self) -> float:
        """Return the time of its event loop. Thread-safe."""
        return (self._loop or asyncio.get_running_loop()).time()

    def wake(self) -> None:
        """Wake all waiting calls."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until woken, or until the timeout."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=max(0.0, timeout_s))
        finally:
            self._waiters.discard(waiter)
            waiter.cancel()

    def candidates(self, backends: Sequence[Backend]) -> list[Candidate]:
        """Return the candidates for `choose`; an engine of unknown speed counts with the mean of the others."""
        speeds = {backend.url: self.load_tracker.speed(backend.url) for backend in backends}
        known = [speed for speed in speeds.values() if speed]
        usual = sum(known) / len(known) if known else 1.0
        return [
            Candidate(
                backend.url,
                self.load_tracker.of(backend.url).n_tokens,
                (speeds[backend.url] or usual) * backend.health.share(self.now()),
            )
            for backend in backends
        ]

    @asynccontextmanager
    async def lend(
        self, backend: Backend, rollout_id: str, n_tokens: int, freeze: Callable[[int], None]
    ) -> AsyncIterator[Engine]:
        """Yield an engine for a call of `n_tokens`, and record its outcome. `freeze` is that of InFlightCall.

        Raises the errors of the block, and CallAborted if the pool aborts the call.
        """
        try:
            async with self._in_flight(backend, n_tokens, freeze) as engine:
                yield engine
        except (ExpertsMissing, ImagesRefused):
            raise
        except EngineUnfit:
            # Its capabilities are no longer the detected ones.
            backend.is_undetected = True
            self._monitor.doubt(backend)
            raise
        except (EngineRefused, CallAborted):
            raise
        except EngineBusy as busy:
            backend.mark_busy(self.now(), busy.retry_after_s)
            raise
        except EngineError as error:
            backend.health = backend.health.after_failure(rollout_id)
            if failed_calls := backend.health.failed_calls:
                self.eject(backend, f"failed {failed_calls}, the last with: {error}")
            self._monitor.doubt(backend)
            raise

    @asynccontextmanager
    async def _in_flight(self, backend: Backend, n_tokens: int, freeze: Callable[[int], None]) -> AsyncIterator[Engine]:
        url, client, started = backend.url, self.client(backend), self.now()
        with (
            self._reported_if_idle(backend),
            client.borrowed() as engine,
            self.load_tracker.taken(url, n_tokens),
            backend.track_call(freeze) as call,
        ):
            n_concurrent = self.load_tracker.of(url).n_calls
            try:
                async with call.timeout:
                    yield engine
            except TimeoutError:
                if call.reason is not None and call.timeout.expired():
                    raise call.reason from None
                raise
            n_concurrent += self.load_tracker.of(url).n_calls
        backend.health = backend.health.after_answer()
        backend.last_answer_at = self.now()
        self.load_tracker.measured(url, n_tokens, self.now() - started, n_concurrent / 2)

    @contextmanager
    def _reported_if_idle(self, backend: Backend) -> Iterator[None]:
        """Report when the last call on a paused engine has ended: a drain waits for that."""
        try:
            yield
        finally:
            if backend.record.paused and not self.load_tracker.own(backend.url).n_calls:
                self.report()

    def longest_s(self, backend: Backend, n_tokens: int) -> float:
        """Return the maximum seconds that a call of `n_tokens` should take an engine under its current load."""
        speed, n_calls = self.load_tracker.speed(backend.url), self.load_tracker.of(backend.url).n_calls
        if not speed:
            return n_tokens / _SLOW_TOKENS_S
        return _SLACK * n_tokens * math.sqrt(max(n_calls, 1)) / speed

    def client(self, backend: Backend) -> SharedEngine:
        return backend.open_client(self._open)

    async def check_suspects(self, backends: Sequence[Backend]) -> None:
        """Check the health of these engines, and wait for the results."""
        await asyncio.gather(*[self._monitor.check(backend) for backend in backends])

    def eject(self, backend: Backend, why: str) -> None:
        """Take an engine out of use for a while; its calls move to other engines."""
        backend.health = backend.health.ejected(self.now(), why)
        self.reporter.report_failure(backend.url, why)
        backend.abort_calls(f"is out: it {why}", died=True)
        self._monitor.look()
        self.wake()


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
    return EngineInfo(kind="openai", model=address.model)
