"""Orders to engines and waiting for them, the same for all clients.

A client only writes orders into the store. Workers carry them out (`workers.process.engine_registry`): every worker
holds back its new calls, one of them sends the order to the engine, and each reports its calls in flight. During a
weight update the client sends heartbeats, the first with the order to pause. If the client is killed, its order stands:
the engines are `abandoned` (shown by lists, `farm doctor`, metrics and an alarm) until the next weight update takes
them over or they are resumed.

If an engine of the update's block cannot be sent its version, the client waits for it: it may have become ready a
moment ago. If it reports other weights, it was restarted, and the version is not named to it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Self

from farm.errors import FarmUnreachable, InvalidRequest
from farm.records.engine import PauseMode
from farm.records.engine_state import Paused, StoredEngine

log = logging.getLogger(__name__)

MODES: tuple[PauseMode, ...] = ("drain", "keep", "abort")
VERSION_CHARS = 64
PATH_CHARS = 500
_POLL_S = 0.25
_HOLD_PERIOD_S = 5.0
_COME_BACK_S = 15.0
"""Seconds to wait for an engine of a weight update's block to come back and have its version named."""

_SERVE_PERIOD_S = 1.0
_AGAIN_S = 5.0
"""Seconds before an engine that did not take its weights is tried again."""


class WeightUpdateOrders(ABC):
    """Pause, name the weights, resume; subclasses implement access to the farm."""

    @abstractmethod
    def chosen(self, urls: Collection[str] | None = None) -> list[StoredEngine]:
        """Return these engines, or all of them. Raises NotFound for an unknown URL."""

    @abstractmethod
    def newest_version(self) -> str:
        """See `Farm.newest_version`."""

    @abstractmethod
    def order_pause(self, paused: Paused, by: str, urls: Collection[str] | None, held: bool = False) -> dict[str, int]:
        """Order engines to pause, or with "" to resume: URL → the number of its last order. Raises NotFound.

        `held`: the client `by` updates weights and sends heartbeats from now on; see `hold`.
        """

    @abstractmethod
    def order_version(self, version: str, urls: Collection[str] | None, path: str = "") -> dict[str, int]:
        """Set the version of engines' weights: URL → the number of its last order. Raises NotFound.

        `path` is where servers can load them: an engine that is new or restarted without them gets the order to do so.
        """

    @abstractmethod
    def hold(self, by: str, urls: Collection[str] | None) -> None:
        """Send a heartbeat of the client `by`, which paused these engines for new weights."""

    @abstractmethod
    def left(self, orders: Mapping[str, int], waited_s: float) -> list[str]:
        """Describe what these orders still wait for: to be followed, or for calls that must end.

        Raises FarmUnreachable if no worker is alive, after waiting for one.
        """

    @abstractmethod
    def _acknowledgements(self) -> AbstractContextManager[Callable[[float], object]]:
        """Provide a function that waits so many seconds, or until a worker or engine acknowledges."""

    def pause(self, mode: PauseMode, urls: Collection[str] | None = None, timeout_s: float = 600.0) -> None:
        """Order a pause and wait for it; see `Farm.pause_engines`.

        On an engine without such orders, `keep` acts like `drain`, and calls cut by `abort` are sent again. The order
        stands after a TimeoutError, and is withdrawn if no worker is alive.
        """
        self._pause(mode, urls, timeout_s, held=False)

    def _pause(self, mode: PauseMode, urls: Collection[str] | None, timeout_s: float, *, held: bool) -> None:
        if mode not in MODES:
            raise InvalidRequest(f"{mode!r} is not one of {', '.join(MODES)}", field="mode")
        chosen = self.order_pause(mode, _me(), urls, held)
        try:
            self._await(chosen, f"pause ({mode})", timeout_s)
        except FarmUnreachable:
            self.order_pause("", "", urls)
            raise

    def resume(self, urls: Collection[str] | None = None, timeout_s: float = 60.0) -> None:
        """Order the end of a pause and wait for it; after a TimeoutError the order stands."""
        self._await(self.order_pause("", "", urls), "resume", timeout_s)

    def set_version(
        self, version: str, urls: Collection[str] | None = None, timeout_s: float = 60.0, path: str = ""
    ) -> list[str]:
        """Name the weights and wait until done, without interrupting calls; see `Farm.set_version`."""
        if not 0 < len(version) <= VERSION_CHARS:
            raise InvalidRequest(f"must have 1 to {VERSION_CHARS} characters", field="version")
        if len(path) > PATH_CHARS:
            raise InvalidRequest(f"must have at most {PATH_CHARS} characters", field="path")
        self._await(self.order_version(version, urls, path), f"take version {version!r}", timeout_s)
        return [engine.url for engine in self.chosen(urls) if engine.engine_version != version]

    @contextmanager
    def weight_update(
        self, version: str, mode: PauseMode, urls: Collection[str] | None, timeout_s: float, path: str = ""
    ) -> Iterator[Sequence[StoredEngine]]:
        """Pause, run the block to push weights, name them, resume; see `Farm.weight_update`.

        Engines with half-written weights would sample tokens of no version. They also stay paused if the version could
        be named to none of them, which raises TimeoutError.
        """
        with self._held(urls):
            try:
                self._pause(mode, urls, timeout_s, held=True)
            except BaseException:
                # no weights have been changed yet
                self.order_pause("", "", urls)
                raise
            try:
                engines = self.chosen(urls)
                yield engines
                self._name(version, engines, timeout_s, path)
            except BaseException as error:
                error.add_note("the engines stay paused, as their weights may be half written: push again and resume")
                raise
            self.resume(urls)

    def _name(self, version: str, given: Sequence[StoredEngine], timeout_s: float, path: str) -> None:
        """Name the version that the block has pushed; wait a while for engines that were not reached at once."""
        had = {engine.url: engine.engine_version for engine in given}
        deadline = time.monotonic() + min(timeout_s, _COME_BACK_S)
        missed = self.set_version(version, list(had), path=path)
        while missed and time.monotonic() < deadline:
            # an engine that reports other weights was restarted and lost the pushed ones
            silent = [engine.url for engine in self.chosen(missed) if engine.engine_version in ("", had[engine.url])]
            if not silent:
                break
            time.sleep(_POLL_S)
            self.set_version(version, silent, path=path)
            missed = [engine.url for engine in self.chosen(missed) if engine.engine_version != version]
        if missed and len(missed) == len(given):
            raise TimeoutError(f"no engine confirmed version {version}: {', '.join(missed)}")
        if missed:
            log.warning("Engines without weights version %s get no calls: %s", version, missed)

    @contextmanager
    def _held(self, urls: Collection[str] | None) -> Iterator[None]:
        over = threading.Event()
        by = _me()

        def run() -> None:
            # the order to pause is the first heartbeat
            while not over.wait(_HOLD_PERIOD_S):
                try:
                    self.hold(by, urls)
                except Exception as error:
                    log.warning("Weight update not renewed; the farm may count it as abandoned: %s", error)

        thread = threading.Thread(target=run, name="weight-update", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_HOLD_PERIOD_S)

    def _await(self, orders: Mapping[str, int], verb: str, timeout_s: float) -> None:
        """Wait until workers and engines follow these orders and calls that must end have ended."""
        started = time.monotonic()
        with self._acknowledgements() as wait:
            while left := self.left(orders, time.monotonic() - started):
                if time.monotonic() - started >= timeout_s:
                    raise TimeoutError(f"engines did not {verb} in {timeout_s:g} s: {'; '.join(left[:8])}")
                wait(_POLL_S)


def _me() -> str:
    return f"{socket.gethostname()}/{os.getpid()}"


class WeightServer:
    """A thread that looks for engines without the farm's weights; `close` ends it, and so does `with`.

    A paused engine is left to the client that paused it; one that is out is skipped until it is back.
    """

    def __init__(self, orders: WeightUpdateOrders, give: Callable[[StoredEngine, str], object]) -> None:
        self._orders = orders
        self._give = give
        self._not_before: dict[str, float] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-served", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closed.wait(_SERVE_PERIOD_S):
            try:
                self._look()
            except Exception as error:
                log.warning("Search for engines without weights failed: %s", error)

    def _look(self) -> None:
        for engine in self._orders.chosen():
            if engine.status == "without weights" and time.monotonic() >= self._not_before.get(engine.url, 0.0):
                self._serve(engine)

    def _serve(self, engine: StoredEngine) -> None:
        version = engine.version
        self._not_before[engine.url] = time.monotonic() + _AGAIN_S
        log.info("Engine %s lacks weights version %s; sending it", engine.url, version)
        try:
            self._give(engine, version)
            # a newer version may have been named meanwhile, which the engine lacks, too
            if [each.version for each in self._orders.chosen([engine.url])] == [version]:
                self._orders.set_version(version, [engine.url])
        except Exception as error:
            log.warning("Engine %s did not take weights version %s: %s", engine.url, version, error)
