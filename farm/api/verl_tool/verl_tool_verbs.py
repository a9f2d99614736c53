"""The routes of VeRL-Tool's tool server; its errors are `{"detail": …}`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.routing import BaseRoute

from farm.api.endpoints import N_THREADS, Endpoints
from farm.api.protocol_parts import refuse_with_detail
from farm.api.protocols import WireProtocol
from farm.api.scopes import RouteScopes
from farm.api.verl_tool.observations import Observations, TrajectorySandboxes
from farm.api.verl_tool.tool_actions import TOOLS
from farm.callers import Scope
from farm.settings import settings


class _Routes:
    """The verbs, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._observations = Observations(endpoints)
        self._sandboxes = TrajectorySandboxes(endpoints)
        self._began = time.monotonic()

    def routes(self) -> list[BaseRoute]:
        endpoints = self._endpoints
        return [
            endpoints.route("POST", "/get_observation", self._observations.answer),
            endpoints.health("/health", self._health),
            endpoints.get("/metrics", lambda request: self._metrics()),
        ]

    def _health(self) -> dict[str, Any]:
        return {
            "status": "healthy",
            "concurrent_requests": self._observations.n_active,
            "thread_pool_size": N_THREADS,
            "active_tasks": self._observations.n_active,
            "max_concurrent": settings().max_sandboxes,
            "tools": list(TOOLS),
            "uptime_seconds": time.monotonic() - self._began,
        }

    def _metrics(self) -> dict[str, Any]:
        limits = {"max_concurrent": settings().max_sandboxes, "timeout": settings().verl_tool_action_s}
        return {
            "active_requests": self._observations.n_active,
            "cached_responses": 0,
            "tools_initialized": len(TOOLS),
            "uptime_seconds": time.monotonic() - self._began,
            "config": {**limits, "hashing_enabled": True},
            "sandboxes": self._sandboxes.counts(),
        }


def _routes(endpoints: Endpoints) -> Sequence[BaseRoute]:
    return _Routes(endpoints).routes()


_SCOPES: RouteScopes = {
    ("POST", "/get_observation"): Scope.SUBMIT,
    ("GET", "/health"): Scope.READ,
    ("GET", "/metrics"): Scope.READ,
}

PROTOCOL = WireProtocol(_routes, refuse_with_detail, _SCOPES)
