"""Push of weights to engines that lack them, by a thread of the trainer's client."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from farm.client.weight_update import WeightUpdateOrders
from farm.records.engine_state import StoredEngine

log = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 1.0
_AGAIN_S = 5.0
"""Seconds before an engine that did not take its weights is tried again."""


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closed.wait(_CHECK_INTERVAL_S):
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
