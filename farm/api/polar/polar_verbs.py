"""The routes of Polar's rollout server, and the pause of its gateways; its errors are `{"detail": …}`."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.routing import BaseRoute

from farm.api.auth import RouteScopes
from farm.api.endpoints import Endpoints
from farm.api.polar.polar_tasks import PolarCancel, PolarPause, PolarTask, PolarTasks, PolarTasksQuery
from farm.api.protocols import WireProtocol, refuse_with_detail
from farm.api.schemas import ApiRequest, RequestRejected
from farm.callers import Scope
from farm.client.http_errors import ProblemDetails
from farm.errors import FarmUnreachable

_POLL_S = 0.25
_ONE = "/rollout/task/{task_id}"
_INFERENCE = "/admin/inference"


class _Routes:
    """The verbs, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._farm = endpoints.farm
        self._tasks = PolarTasks(endpoints.farm)

    def routes(self) -> list[BaseRoute]:
        endpoints, tasks = self._endpoints, self._tasks
        return [
            endpoints.health("/health"),
            endpoints.route("POST", "/rollout/task/submit", self._submit),
            endpoints.get(_ONE, lambda request: tasks.status(request.path["task_id"])),
            endpoints.route("DELETE", _ONE, lambda request: endpoints.run(self._cancel, request)),
            endpoints.get("/rollout/status", lambda request: tasks.counts()),
            endpoints.get("/tasks", lambda request: {"tasks": tasks.listing(request.parse_query(PolarTasksQuery))}),
            endpoints.get("/tasks/{task_id}/sessions", self._sessions),
            endpoints.get(f"{_INFERENCE}/status", lambda request: self._inference()),
            endpoints.route("POST", f"{_INFERENCE}/pause", self._pause, takes_body=False),
            endpoints.post(f"{_INFERENCE}/resume", self._resume, takes_body=False),
        ]

    async def _submit(self, request: ApiRequest) -> dict[str, str]:
        task = request.parse_body(PolarTask)
        await self._endpoints.run(self._tasks.submit, task)
        return {"task_id": task.task_id, "status": "running"}

    def _cancel(self, request: ApiRequest) -> Any:
        return self._tasks.cancel(request.path["task_id"], request.parse_query(PolarCancel).register_if_missing)

    def _sessions(self, request: ApiRequest) -> Any:
        task_id = request.path["task_id"]
        return {"task_id": task_id, "sessions": self._tasks.sessions(task_id)}

    async def _pause(self, request: ApiRequest) -> Any:
        """Pause all engines of the farm, and answer once no call is in flight. After a 504 the pause remains."""
        endpoints = self._endpoints
        limit_s = request.parse_query(PolarPause).timeout_seconds
        orders = await endpoints.run(self._farm.orders.order_pause, "drain", "polar", None)
        loop = asyncio.get_running_loop()
        began = loop.time()
        while left := await endpoints.run(self._left, orders, loop.time() - began):
            if loop.time() - began > limit_s:
                message = (
                    f"the engines are paused, and after {limit_s:.0f} s these still block: {'; '.join(left)[:1000]}"
                )
                raise RequestRejected(ProblemDetails(504, "ServiceError", message))
            await asyncio.sleep(_POLL_S)
        return await endpoints.run(self._inference)

    def _left(self, orders: dict[str, int], waited_s: float) -> list[str]:
        try:
            return self._farm.orders.left(orders, waited_s)
        except FarmUnreachable:
            # without a worker nothing is in flight, and nothing begins
            return []

    def _resume(self, request: ApiRequest) -> Any:
        self._farm.orders.order_pause("", "", None)
        return self._inference()

    def _inference(self) -> dict[str, Any]:
        engines = self._farm.engines()
        is_paused = bool(engines) and all(each.engine.paused for each in engines)
        return {"paused": is_paused, "inflight": sum(each.n_calls for each in engines)}


_SCOPES: RouteScopes = {
    ("GET", "/health"): Scope.READ,
    ("POST", "/rollout/task/submit"): Scope.SUBMIT,
    ("GET", _ONE): Scope.READ,
    ("DELETE", _ONE): (Scope.SUBMIT, Scope.OPERATE),
    ("GET", "/rollout/status"): Scope.READ,
    ("GET", "/tasks"): Scope.READ,
    ("GET", "/tasks/{task_id}/sessions"): Scope.READ,
    ("GET", f"{_INFERENCE}/status"): Scope.READ,
    ("POST", f"{_INFERENCE}/pause"): Scope.OPERATE,
    ("POST", f"{_INFERENCE}/resume"): Scope.OPERATE,
}

PROTOCOL = WireProtocol(lambda endpoints: _Routes(endpoints).routes(), refuse_with_detail, _SCOPES)
