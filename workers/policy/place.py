"""One engine of the pool in this process: what the farm says of it, how it stands, and the calls that run there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from farm.engine import EngineInfo
from farm.errors import EngineError
from workers.policy.generation import Engine, EngineAddress
from workers.policy.health import Standing
from workers.policy.listed import Listed, Paused

OpenEngine: TypeAlias = Callable[[EngineAddress, EngineInfo], Engine]


class CutOff(EngineError):
    """A call was ended from here, to be made again: its engine died, or was paused for new weights."""

    def __init__(self, message: str, *, died: bool) -> None:
        super().__init__(message)
        self.died = died


class Client:
    """A connection to an engine, closed once it is given up and nobody uses it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._n_users = 0
        self._given_up = False
        self._closing: asyncio.Task[None] | None = None

    @contextmanager
    def used(self) -> Iterator[Engine]:
        self._n_users += 1
        try:
            yield self.engine
        finally:
            self._n_users -= 1
            self._close_if_free()

    def give_up(self) -> None:
        self._given_up = True
        self._close_if_free()

    def _close_if_free(self) -> None:
        if self._given_up and self._n_users == 0 and self._closing is None:
            self._closing = asyncio.ensure_future(self.engine.aclose())

    async def closed(self) -> None:
        """Close it now, whoever uses it."""
        self._given_up = True
        if self._closing is None:
            self._closing = asyncio.ensure_future(self.engine.aclose())
        await self._closing


class Flight:
    """One call in flight, which can be cut off. `freeze` is told +1 when its engine freezes it, and -1 afterwards."""

    def __init__(self, freeze: Callable[[int], None]) -> None:
        self.timeout = asyncio.timeout(None)
        self.reason: CutOff | None = None
        self._freeze = freeze
        self._frozen = False

    def freeze(self, frozen: bool) -> None:
        if frozen != self._frozen:
            self._frozen = frozen
            self._freeze(1 if frozen else -1)

    def cut(self, reason: CutOff) -> None:
        if self.reason is None:
            self.reason = reason
            self.timeout.reschedule(asyncio.get_running_loop().time())


class Place:
    """An engine while it is listed."""

    def __init__(self, listed: Listed, standing: Standing) -> None:
        self.listed = listed
        self.info = listed.info
        self.unasked = listed.info is None
        """Whether it has still to be asked what it can do, for the first time or anew."""
        self.standing = standing
        self.flights: set[Flight] = set()
        self.heard_at = 0.0
        """When it last answered a call, or got one while it had none."""
        self.told_pause: Paused = ""
        """How this process knows that it is paused; what is written down only says how it may be."""
        self.client: Client | None = None

    @property
    def url(self) -> str:
        return self.listed.address.url

    @property
    def missed(self) -> str:
        """Which weights the farm plays with and this engine does not have; empty if it does."""
        listed = self.listed
        return "" if listed.to_name or listed.version == listed.engine_version else listed.version

    def serves(self, model: str) -> bool:
        return not model or self.listed.address.model in ("", model)

    @property
    def frozen(self) -> bool:
        """Whether the calls that run here stand still until it is resumed."""
        return self.listed.paused == "keep" and self.info is not None and self.info.control

    def silent_s(self, now: float) -> float:
        """For how long none of the calls that run here has been answered."""
        return now - self.heard_at if self.flights else 0.0

    def update(self, listed: Listed) -> bool:
        """What the farm says now; whether it must be asked anew what it can do.

        The client of another address, or of what can do other things, is given up.
        """
        moved = listed.address != self.listed.address
        anew = listed.info is None and (moved or self.listed.info is not None)
        if anew:
            self.unasked = True
            self.standing.out_until = 0.0
        if self.listed.paused and not listed.paused:
            self.standing.resumed()
            self.told_pause = ""
        self.listed = listed
        if moved:
            self.drop_client()
            self.info = None
        if listed.info is not None and listed.info != self.info:
            self.learn(listed.info)
        for flight in self.flights:
            flight.freeze(self.frozen)
        return anew

    def learn(self, info: EngineInfo) -> None:
        """What it can do."""
        if info != self.info:
            self.drop_client()
        self.info = info
        self.unasked = False

    def use(self, open_engine: OpenEngine) -> Client:
        """The client, which needs `info`."""
        if self.client is None:
            assert self.info is not None
            self.client = Client(open_engine(self.listed.address, self.info))
        return self.client

    def drop_client(self) -> None:
        if self.client is not None:
            self.client.give_up()
            self.client = None

    def cut(self, why: str, *, died: bool) -> None:
        """End all calls that run here; they are made again."""
        for flight in list(self.flights):
            flight.cut(CutOff(f"engine {self.url} {why}", died=died))

    @contextmanager
    def flying(self, freeze: Callable[[int], None]) -> Iterator[Flight]:
        """A call that runs here while the block does."""
        flight = Flight(freeze)
        if not self.flights:
            self.heard_at = asyncio.get_running_loop().time()
        self.flights.add(flight)
        try:
            yield flight
        finally:
            self.flights.discard(flight)
            flight.freeze(False)
