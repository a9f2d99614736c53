"""Views of nodes and engines, with an hour of history, and of alarms."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from farm.api.endpoints import Endpoints
from farm.errors import ServiceError
from farm.records.rollout import Stage, State
from farm.store.reports.rollout_costs import live_by_node
from farm.web.live_updates import LiveUpdates, SharedResults
from farm.web.rendering import HEADERS, html, rendered

KEPT_S = 3600.0
PERIOD_S = 15.0


@dataclass(frozen=True, slots=True)
class HistorySample:
    """Numbers at one time, by name."""

    at: float
    values: dict[str, float]


class ClusterHistory:
    """Samples that `look` takes every PERIOD_S, from `start` until the process ends."""

    def __init__(self, look: Callable[[], dict[str, float]]) -> None:
        self._look = look
        self._samples: deque[HistorySample] = deque(maxlen=round(KEPT_S / PERIOD_S))
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Take samples from now on; later calls change nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="history", daemon=True)
            self._thread.start()

    def series(self, names: list[str]) -> list[list[float | None]]:
        """Return the times, and the values of each name at these times; None where it had none."""
        samples = list(self._samples)
        times: list[float | None] = [sample.at for sample in samples]
        return [times, *([sample.values.get(name) for sample in samples] for name in names)]

    def names(self) -> list[str]:
        """Return all names that have a value."""
        return sorted({name for sample in list(self._samples) for name in sample.values})

    def _run(self) -> NoReturn:
        while True:
            # no samples while the database is unavailable
            with suppress(ServiceError):
                self._samples.append(HistorySample(time.time(), self._look()))
            time.sleep(PERIOD_S)


class ClusterViews:
    """The views."""

    def __init__(self, endpoints: Endpoints, records_history: bool = False) -> None:
        self._endpoints = endpoints
        self._updates = LiveUpdates(endpoints)
        self._history = ClusterHistory(self._numbers)
        if records_history:
            self._history.start()
        self._parts: SharedResults[tuple[str, bool]] = SharedResults(1.0)
        self._alarms: SharedResults[dict[str, Any]] = SharedResults(15.0)

    async def nodes_and_engines(self, request: Request) -> Response:
        """Show all nodes and engines, updated live."""
        self._history.start()
        return html("cluster.html", **await self._endpoints.run(self._state))

    async def live(self, request: Request) -> Response:
        """Stream them whenever they change."""

        async def part() -> tuple[str, bool]:
            return rendered("_cluster.html", **await self._endpoints.run(self._state)), False

        return self._updates.stream(lambda: self._parts.get("", part))

    async def history(self, request: Request) -> Response:
        """Return the history of nodes and engines in this process, for the chart."""
        self._history.start()
        names = self._history.names()
        return JSONResponse({"names": names, "series": self._history.series(names)}, headers=HEADERS)

    async def alarms(self, request: Request) -> Response:
        """Show the problems of the farm, and of its newest batches."""

        def look() -> dict[str, Any]:
            farm = self._endpoints.farm
            newest = farm.batches(10)
            violations = [
                (each.batch_id, farm.violations(each.batch_id)) for each in newest if each.n_rollouts <= 20_000
            ]
            return {
                "findings": list(self._endpoints.examine()),
                "violations": [(batch_id, found) for batch_id, found in violations if found],
                "engines": [each.engine for each in farm.engines() if each.engine.trouble],
                "nodes": [node for node in farm.nodes() if node.out_of_service_s > 0],
            }

        return html("alarms.html", **await self._alarms.get("", lambda: self._endpoints.run(look)))

    def _state(self) -> dict[str, Any]:
        farm = self._endpoints.farm
        busy: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for node, stage, state, n in farm.store.read(live_by_node):
            busy[node][f"{stage} {state}"] = n
        return {"nodes": farm.nodes(), "busy": dict(busy), "engines": farm.engines(), "stages": list(Stage)}

    def _numbers(self) -> dict[str, float]:
        """Return the numbers of the history: busy slots of each node, calls in flight at each engine."""
        farm = self._endpoints.farm
        values: defaultdict[str, float] = defaultdict(float)
        for name, _, state, n in farm.store.read(live_by_node):
            if state == State.ACTIVE.value:
                values[f"node {name}"] += n
        for node in farm.nodes():
            values[f"node {node.node}"] += 0
        for each in farm.engines():
            values[f"engine {each.engine.url}"] = each.n_calls
        return dict(values)
