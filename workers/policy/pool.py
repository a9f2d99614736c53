"""The engines of a worker process: which there are, what each has to do, how each stands, and the calls there.

Rollouts reach them by their `Seat`, which finds an engine for each call, and another when that one fails, is busy,
drained or paused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from farm.errors import EngineError
from farm.trajectory import version_number
from workers.policy.choice import Candidate
from workers.policy.engines import detect, open_engine
from workers.policy.generation import Engine, EngineBusy, EngineRefused, EngineUnfit
from workers.policy.health import Standing
from workers.policy.listed import InFlight, Ledger, Listed, NoLedger
from workers.policy.load import OtherLoads, Tally
from workers.policy.monitor import Detect, Monitor
from workers.policy.place import Client, CutOff, OpenEngine, Place
from workers.policy.seat import Seat, Wish

T = TypeVar("T")

__all__ = ["EnginePool", "Seat", "Wish"]


class EnginePool:
    """The engines of a worker process, for one event loop at a time.

    `fleet` says which engines there are; it is asked before each call, so it must be quick, and `changed` be called
    when it says something new. `none_s` is how long a call waits for an engine where none is listed at all.
    """

    def __init__(
        self,
        fleet: Callable[[], Sequence[Listed]],
        *,
        open_engine: OpenEngine = open_engine,
        detect: Detect = detect,
        ledger: Ledger | None = None,
        others: OtherLoads | None = None,
        check_s: float = 3.0,
        none_s: float = 30.0,
    ) -> None:
        self.ledger = ledger or NoLedger()
        self.tally = Tally(others)
        self.none_s = none_s
        self._fleet = fleet
        self._open = open_engine
        self._places: dict[str, Place] = {}
        self._seen: tuple[Listed, ...] | None = None
        self._monitor = Monitor(self, detect, check_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    def seat(self, wish: Wish) -> Seat:
        """One rollout's way to the engines."""
        return Seat(self, wish)

    @property
    def newest_version(self) -> str:
        """The newest weights that any engine was told it has; empty if none was told."""
        return max((listed.version for listed in self._fleet()), key=version_number, default="")

    def version_of(self, url: str) -> str:
        return self._places[url].listed.engine_version if url in self._places else ""

    async def start(self) -> None:
        """Begin to watch the engines; the first call does it too. A worker with nothing to do must watch them, too."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._forget_loop()
            self._loop = loop
            self._monitor.start()
            self.sync()

    async def aclose(self) -> None:
        """Close the connections that this event loop opened, and watch no more. Harmless when repeated."""
        if self._loop is not asyncio.get_running_loop():
            return
        await self._monitor.stop()
        clients = [place.client for place in self._places.values() if place.client is not None]
        self._forget_loop()
        for client in clients:
            await client.closed()

    def _forget_loop(self) -> None:
        self._loop = None
        self._waiters = set()
        for place in self._places.values():
            place.client = None

    def changed(self) -> None:
        """There is news of the fleet: look at once. From any thread."""
        loop = self._loop
        if loop is not None:
            # a loop that is closed by now has nobody who waits
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.sync)

    def sync(self) -> None:
        """Take over what the fleet says now."""
        now = tuple(self._fleet())
        if now == self._seen:
            return
        first, self._seen = self._seen is None, now
        listed = {each.address.url: each for each in now}
        for url in self._places.keys() - listed.keys():
            place = self._places.pop(url)
            if place.frozen:
                # nobody will resume it
                place.cut("is not listed any more", died=False)
            place.drop_client()
            self._monitor.forget(url)
            self.tally.forget(url)
        for url, each in listed.items():
            if url not in self._places:
                # those that were there before this process are not new to the farm
                self._places[url] = Place(each, Standing(None if first else self.now()))
            elif self._places[url].update(each):
                self._monitor.doubt(self._places[url])
        self._hold_back()
        self._monitor.look()
        self.wake()

    def _hold_back(self) -> None:
        for place in self._places.values():
            has_control = place.info is not None and place.info.control
            if place.listed.paused == "abort" and not has_control:
                place.cut("is paused for new weights", died=False)
        self.report()

    def report(self) -> None:
        """Say what is in flight, and which orders this process follows."""
        found: dict[str, InFlight] = {}
        for url, place in self._places.items():
            load = self.tally.own(url)
            found[url] = InFlight(place.listed.n_orders, load.n_calls, load.n_tokens)
        self.ledger.report(found)

    @property
    def places(self) -> Sequence[Place]:
        return list(self._places.values())

    def now(self) -> float:
        """The time of its event loop; from any thread."""
        return (self._loop or asyncio.get_running_loop()).time()

    def wake(self) -> None:
        """Let all calls that wait look again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def news(self, timeout_s: float) -> None:
        """Wait until woken, or for so long."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=max(0.0, timeout_s))
        finally:
            self._waiters.discard(waiter)
            waiter.cancel()

    def candidates(self, places: Sequence[Place]) -> list[Candidate]:
        """What `choose` wants to know of them; one nobody has measured is taken to be as fast as the others."""
        speeds = {place.url: self.tally.speed(place.url) for place in places}
        known = [speed for speed in speeds.values() if speed]
        usual = sum(known) / len(known) if known else 1.0
        return [
            Candidate(
                place.url,
                self.tally.of(place.url).n_tokens,
                (speeds[place.url] or usual) * place.standing.share(self.now()),
            )
            for place in places
        ]

    async def play(
        self,
        place: Place,
        wish: Wish,
        n_tokens: int,
        ask: Callable[[Engine], Awaitable[T]],
        freeze: Callable[[int], None],
    ) -> T:
        """Make a call on an engine, and take note of how it ends. `freeze` as Flight says."""
        try:
            return await self._ask(place, n_tokens, ask, freeze)
        except EngineUnfit:
            # it is not what it was taken for, or not any more
            place.unasked = True
            self._monitor.doubt(place)
            raise
        except (EngineRefused, CutOff):
            raise
        except EngineBusy as busy:
            place.standing.busy(self.now(), busy.retry_after_s)
            raise
        except EngineError as error:
            if which := place.standing.failed(wish.rollout_id):
                self.eject(place, f"failed {which}, the last with: {error}")
            self._monitor.doubt(place)
            raise

    async def _ask(
        self, place: Place, n_tokens: int, ask: Callable[[Engine], Awaitable[T]], freeze: Callable[[int], None]
    ) -> T:
        url, client, started = place.url, self.client(place), self.now()
        try:
            with client.used() as engine, self.tally.taken(url, n_tokens), place.flying(freeze) as flight:
                beside = self.tally.of(url).n_calls
                try:
                    async with flight.timeout:
                        answer = await ask(engine)
                except TimeoutError:
                    if flight.reason is not None and flight.timeout.expired():
                        raise flight.reason from None
                    raise
                beside += self.tally.of(url).n_calls
        finally:
            if place.listed.paused and not self.tally.own(url).n_calls:
                self.report()
        place.standing.answered()
        place.heard_at = self.now()
        self.tally.measured(url, n_tokens, self.now() - started, beside / 2)
        return answer

    def client(self, place: Place) -> Client:
        return place.use(self._open)

    async def doubted(self, places: Sequence[Place]) -> None:
        """Ask these engines how they are, and wait for what they say."""
        await asyncio.gather(*[self._monitor.check(place) for place in places])

    def eject(self, place: Place, why: str) -> None:
        """Use an engine no more for a while; the calls that run there are made elsewhere."""
        place.standing.eject(self.now(), why)
        self.ledger.failing(place.url, why)
        place.cut(f"is out: it {why}", died=True)
        self._monitor.look()
        self.wake()
