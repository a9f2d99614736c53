"""The verbs for engines: add, drain, remove, list; pause, name the weights, resume.

A client only writes orders into the store. Whoever runs workers carries them out (`workers.fleet`): every worker holds
its new calls back, one of them tells the engine, and each reports what it still has in flight. A client that is killed
leaves its order standing, visible in `farm engines list` and to `farm doctor`, until somebody resumes the engines.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from farm.engine import PauseMode
from farm.errors import FarmUnreachable, InvalidRequest, NotFound
from farm.signals import HEEDED, Signals
from farm.store import engines
from farm.store.engine import Store
from farm.store.engines import Engine, Use

log = logging.getLogger(__name__)

ALIVE_S = 20.0
"""A process that asks engines reports at least four times in this; silent for longer, it counts as dead."""
MODES: tuple[PauseMode, ...] = ("drain", "keep", "abort")
_POLL_S = 0.25
_VERSION_CHARS = 64


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine, and what all workers have in flight there by their last reports, at most a few seconds old."""

    engine: Engine
    n_calls: int
    n_tokens: int


class Engines:
    """The verbs, on a store and its signals. `workers_s` is how long an order waits for a first sign of a worker."""

    def __init__(self, store: Store, signals: Signals, workers_s: float = 5.0) -> None:
        self._workers_s = workers_s
        self._store = store
        self._signals = signals

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

    def pause(self, mode: PauseMode, urls: Collection[str] | None = None, timeout_s: float = 600.0) -> None:
        """Hold back new calls to all engines, or these, and return when they are paused and, but for `keep`, idle.

        Calls that run end first (`drain`), freeze (`keep`) or are cut and go on after `resume` (`abort`). On an engine
        that takes no such orders, `keep` is `drain`, and what `abort` cuts is asked anew.

        Raises TimeoutError naming what still runs, FarmUnreachable if no worker is alive to do it: the order stands
        in the first case and is taken back in the second.
        """
        if mode not in MODES:
            raise InvalidRequest(f"{mode!r} is none of {', '.join(MODES)}", field="mode")
        by = f"{socket.gethostname()}/{os.getpid()}"
        chosen = self._order(urls, lambda connection: engines.set_paused(connection, mode, by, urls))
        try:
            self._await(chosen, f"pause ({mode})", timeout_s)
        except FarmUnreachable:
            self._order(urls, lambda connection: engines.set_paused(connection, "", "", urls))
            raise

    def resume(self, urls: Collection[str] | None = None, timeout_s: float = 60.0) -> None:
        """Let calls go on. Raises TimeoutError naming the engines that do not resume: the order stands."""
        chosen = self._order(urls, lambda connection: engines.set_paused(connection, "", "", urls))
        self._await(chosen, "resume", timeout_s)

    def set_version(self, version: str, urls: Collection[str] | None = None, timeout_s: float = 60.0) -> list[str]:
        """Name the weights that all engines, or these, have now, without cutting what runs.

        Returns those that could not be reached: they get no calls until they are told again. Raises as `pause`.
        """
        if not 0 < len(version) <= _VERSION_CHARS:
            raise InvalidRequest(f"must have 1 to {_VERSION_CHARS} characters", field="version")
        chosen = self._order(urls, lambda connection: engines.set_version(connection, version, urls))
        self._await(chosen, f"take version {version!r}", timeout_s)
        return [engine.url for engine in self._chosen(urls) if engine.engine_version != version]

    @contextmanager
    def weight_update(
        self, version: str, mode: PauseMode, urls: Collection[str] | None, timeout_s: float
    ) -> Iterator[Sequence[Engine]]:
        """Pause, let the block push weights, name them, resume. The block is given the engines.

        If the block fails the engines stay paused: their weights may be half written, and what they would sample
        belongs to no version. An engine that is out meanwhile gets no calls until it is told that it has them.
        """
        try:
            self.pause(mode, urls, timeout_s)
        except BaseException:
            # no weights have been touched yet
            self._order(urls, lambda connection: engines.set_paused(connection, "", "", urls))
            raise
        try:
            yield self._chosen(urls)
        except BaseException as error:
            error.add_note("the engines stay paused, as their weights may be half written: push again and resume them")
            raise
        if missed := self.set_version(version, urls):
            log.warning("engines that were out when they were to take version %s get no calls: %s", version, missed)
        self.resume(urls)

    def _order(self, urls: Collection[str] | None, order: Callable[..., None]) -> dict[str, int]:
        """Write an order: URL → its number there. Raises NotFound for a URL that is no engine's."""
        self._chosen(urls)
        self._store.write(order)
        self._signals.engines()
        return {engine.url: engine.n_orders for engine in self._chosen(urls)}

    def _chosen(self, urls: Collection[str] | None) -> list[Engine]:
        known = {engine.url: engine for engine in self._store.read(engines.listing)}
        if urls is None:
            return list(known.values())
        wanted = [engines.normal_url(url) for url in urls]
        if missing := [url for url in wanted if url not in known]:
            raise NotFound(f"there is no engine {missing[0]}: `farm engines list` shows those that there are")
        return [known[url] for url in wanted]

    def _await(self, orders: Mapping[str, int], what: str, timeout_s: float) -> None:
        """Until all workers follow these orders and the engines were told, and what must end has ended."""
        started = time.monotonic()
        listener = self._signals.listen(HEEDED)
        try:
            while left := self._left(orders, time.monotonic() - started):
                if time.monotonic() - started >= timeout_s:
                    raise TimeoutError(f"engines did not {what} in {timeout_s:g} s: {'; '.join(left[:8])}")
                listener.wait(_POLL_S)
        finally:
            listener.close()

    def _left(self, orders: Mapping[str, int], waited_s: float) -> list[str]:
        """What is still missing, in words."""
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
