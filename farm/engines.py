"""The verbs for engines on a store: add, drain, remove, list, and the orders that `farm.orders` waits for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from farm.errors import FarmUnreachable, NotFound
from farm.orders import Orders
from farm.signals import Signals
from farm.store import engines
from farm.store.engine import Store
from farm.store.engines import Engine, Paused, Use

ALIVE_S = 20.0
"""A process that asks engines reports at least four times in this; silent for longer, it counts as dead."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine, and what all workers have in flight there by their last reports, at most a few seconds old."""

    engine: Engine
    n_calls: int
    n_tokens: int


class Engines(Orders):
    """The verbs, on a store and its signals. `workers_s` is how long an order waits for a first sign of a worker."""

    def __init__(self, store: Store, signals: Signals, workers_s: float = 5.0) -> None:
        super().__init__(signals)
        self._workers_s = workers_s
        self._store = store

    def add(self, engine: Engine) -> None:
        """Use a server from now on. Raises InvalidRequest for an address that is none."""
        self._store.write(lambda connection: engines.add(connection, engine))
        self._signals.engines()

    def drain(self, url: str) -> None:
        """Send no new rollouts to it; those that play there finish there. Raises NotFound."""
        self._change(url, engines.drain)

    def remove(self, url: str) -> None:
        """Use it no more; the calls that run there end there, what plays there moves on. Raises NotFound."""
        self._change(url, engines.remove)

    def clear(self) -> int:
        """Use none of them any more; how many there were."""
        n = self._store.write(engines.clear)
        self._signals.engines()
        return n

    def _change(self, url: str, verb: Callable[..., bool]) -> None:
        if not self._store.write(lambda connection: verb(connection, url)):
            raise NotFound(f"there is no engine {url}: `farm engines list` shows those that there are")
        self._signals.engines()

    def states(self) -> list[EngineState]:
        """All engines, oldest first."""
        by_owner = self._store.read(lambda connection: engines.uses(connection, ALIVE_S))
        return [_state(engine, by_owner) for engine in self._store.read(engines.listing)]

    def chosen(self, urls: Collection[str] | None = None) -> list[Engine]:
        """These engines, or all of them. Raises NotFound for a URL that is no engine's."""
        known = {engine.url: engine for engine in self._store.read(engines.listing)}
        if urls is None:
            return list(known.values())
        wanted = [engines.normal_url(url) for url in urls]
        if missing := [url for url in wanted if url not in known]:
            raise NotFound(f"there is no engine {missing[0]}: `farm engines list` shows those that there are")
        return [known[url] for url in wanted]

    def order_pause(self, paused: Paused, by: str, urls: Collection[str] | None) -> dict[str, int]:
        """Order engines to pause, or with "" to go on: URL → the number of its last order. Raises NotFound."""
        return self._order(urls, lambda connection: engines.set_paused(connection, paused, by, urls))

    def order_version(self, version: str, urls: Collection[str] | None) -> dict[str, int]:
        """Order engines to call their weights this: URL → the number of its last order. Raises NotFound."""
        return self._order(urls, lambda connection: engines.set_version(connection, version, urls))

    def _order(self, urls: Collection[str] | None, order: Callable[..., None]) -> dict[str, int]:
        self.chosen(urls)
        self._store.write(order)
        self._signals.engines()
        return {engine.url: engine.n_orders for engine in self.chosen(urls)}

    def left(self, orders: Mapping[str, int], waited_s: float) -> list[str]:
        """What is missing until these are followed and what must end has ended, in words.

        Raises FarmUnreachable if no worker is alive, once that was waited for.
        """
        known = {engine.url: engine for engine in self._store.read(engines.listing)}
        by_owner = self._store.read(lambda connection: engines.uses(connection, ALIVE_S))
        wanted = {url: order for url, order in orders.items() if url in known}
        if not wanted:
            return []
        if not by_owner:
            if waited_s > self._workers_s:
                raise FarmUnreachable("no worker of this farm is alive that could tell the engines: start a node")
            return ["no worker is alive yet"]
        return [
            complaint
            for url, order in wanted.items()
            for complaint in (*_untold(known[url], order), *_unheeded(known[url], order, by_owner))
        ]


def _state(engine: Engine, by_owner: Mapping[str, Mapping[str, Use]]) -> EngineState:
    found = [uses[engine.url] for uses in by_owner.values() if engine.url in uses]
    return EngineState(engine, sum(use.n_calls for use in found), sum(use.n_tokens for use in found))


def _untold(engine: Engine, order: int) -> Iterator[str]:
    if engine.n_done < order:
        yield f"{engine.url} was not told" + (f" ({engine.failure})" if engine.failure else "")


def _unheeded(engine: Engine, order: int, by_owner: Mapping[str, Mapping[str, Use]]) -> Iterator[str]:
    for owner, uses in by_owner.items():
        use = uses.get(engine.url)
        if use is None or use.n_orders < order:
            yield f"worker {owner} does not know of it yet"
        elif use.n_calls and _must_be_idle(engine):
            yield f"worker {owner} has {use.n_calls} calls in flight on {engine.url}"


def _must_be_idle(engine: Engine) -> bool:
    """Whether its pause means that calls end. One that cannot be told to freeze them has to finish them."""
    freezes = engine.paused == "keep" and engine.info is not None and engine.info.control
    return bool(engine.paused) and not freezes
