"""Orders to engines, on a store; `farm.client.weight_update` waits for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager

from farm.client.weight_update import WeightUpdateOrders
from farm.engine_urls import normal_url
from farm.errors import FarmUnreachable, NotFound
from farm.notifications import ACKNOWLEDGED, Signals
from farm.records.engine_state import EngineUse, Paused, StoredEngine, is_reserved
from farm.store import llm_engines
from farm.store.access.audit_log import logged
from farm.store.database import Store

ALIVE_S = 20.0
"""Seconds of silence until a process that calls engines counts as dead; it reports at least every quarter."""


class LocalOrders(WeightUpdateOrders):
    """Orders on a store and its signals. `workers_s` is how long an order waits for a first sign of a worker."""

    def __init__(self, store: Store, signals: Signals, workers_s: float) -> None:
        self._store = store
        self._signals = signals
        self._workers_s = workers_s

    @contextmanager
    def _acknowledgements(self) -> Iterator[Callable[[float], object]]:
        with closing(self._signals.listen(ACKNOWLEDGED)) as listener:
            yield listener.wait

    def chosen(self, urls: Collection[str] | None = None) -> list[StoredEngine]:
        known = {engine.url: engine for engine in self._store.read(llm_engines.listing)}
        if urls is None:
            return [engine for engine in known.values() if not is_reserved(engine.model)]
        wanted = [normal_url(url) for url in urls]
        if missing := [url for url in wanted if url not in known]:
            raise NotFound(f"there is no engine {missing[0]}: `farm engines list` lists the engines")
        return [known[url] for url in wanted]

    def newest_version(self) -> str:
        return self._store.read(llm_engines.newest_version)

    def order_pause(self, paused: Paused, by: str, urls: Collection[str] | None, held: bool = False) -> dict[str, int]:
        order = logged(
            lambda connection: llm_engines.set_paused(connection, paused, by, urls, held),
            *("engines pause" if paused else "engines resume", _named(urls), f"{paused} by {by}".strip()),
        )
        return self._order(urls, order)

    def order_version(self, version: str, urls: Collection[str] | None, path: str = "") -> dict[str, int]:
        order = logged(
            lambda connection: llm_engines.set_version(connection, version, urls, path),
            *("engines version", _named(urls), f"{version} {path}".strip()),
        )
        return self._order(urls, order)

    def hold(self, by: str, urls: Collection[str] | None) -> None:
        self._store.write(lambda connection: llm_engines.hold(connection, by, urls))

    def _order(self, urls: Collection[str] | None, order: Callable[..., None]) -> dict[str, int]:
        self.chosen(urls)
        self._store.write(order)
        self._signals.engines()
        return {engine.url: engine.n_orders for engine in self.chosen(urls)}

    def left(self, orders: Mapping[str, int], waited_s: float) -> list[str]:
        known = {engine.url: engine for engine in self._store.read(llm_engines.listing)}
        by_owner = self._store.read(lambda connection: llm_engines.uses(connection, ALIVE_S))
        wanted = {url: order for url, order in orders.items() if url in known}
        if not wanted:
            return []
        if not by_owner:
            if waited_s > self._workers_s:
                raise FarmUnreachable("no worker of this farm is alive to pass orders to the engines: start a node")
            return ["no worker is alive yet"]
        return [
            complaint
            for url, order in wanted.items()
            for complaint in (*_unnotified(known[url], order), *_unacknowledged(known[url], order, by_owner))
        ]


def _named(urls: Collection[str] | None) -> str:
    return "all" if urls is None else ", ".join(urls)


def _unnotified(engine: StoredEngine, order: int) -> Iterator[str]:
    if engine.n_done < order:
        yield f"{engine.url} was not told" + (f" ({engine.failure})" if engine.failure else "")


def _unacknowledged(engine: StoredEngine, order: int, by_owner: Mapping[str, Mapping[str, EngineUse]]) -> Iterator[str]:
    for owner, uses in by_owner.items():
        use = uses.get(engine.url)
        if use is None or use.n_orders < order:
            yield f"worker {owner} does not know of it yet"
        elif use.n_calls and _must_be_idle(engine):
            yield f"worker {owner} has {use.n_calls} calls in flight on {engine.url}"


def _must_be_idle(engine: StoredEngine) -> bool:
    """Return whether the pause requires that calls end: engines that cannot freeze calls finish them."""
    freezes = engine.paused == "keep" and engine.info is not None and engine.info.control
    return bool(engine.paused) and not freezes
