"""The routes of Agent Lightning's gateway; its errors are `{"detail": …}`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute

from farm.api.agent_lightning.lightning_models import (
    ATTEMPT,
    EventsQuery,
    LightningModels,
    LightningState,
    ListQuery,
    ModelServers,
    NewEvent,
    NewRollouts,
    PauseRequest,
    RolloutPatch,
    TerminalQuery,
)
from farm.api.agent_lightning.lightning_rollouts import LightningEvents, LightningRollouts
from farm.api.auth import RouteScopes
from farm.api.endpoints import Endpoints
from farm.api.protocols import WireProtocol, refuse_with_detail
from farm.api.schemas import ApiRequest
from farm.callers import Scope
from farm.client import serialization
from farm.client.request_checks import checked
from farm.errors import Conflict, NotFound

_AGENTS_CALLS = "/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}/openai/v1/{path:path}"


class _Routes:
    """The verbs, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._rollouts = LightningRollouts(endpoints.farm)
        self._events = LightningEvents(endpoints.farm, self._rollouts)
        self._models = LightningModels(endpoints.farm)

    def routes(self) -> list[BaseRoute]:
        endpoints, one = self._endpoints, "/api/rollouts/{rollout_id}"
        return [
            endpoints.health("/healthz"),
            endpoints.post("/api/rollouts", self._create),
            endpoints.get("/api/rollouts", self._list),
            endpoints.get("/api/rollouts/terminal", self._terminal),
            endpoints.get(one, self._get),
            self._verb("PATCH", one, self._patch),
            self._verb("DELETE", one, self._delete),
            endpoints.get(f"{one}/events", self._list_events),
            endpoints.post(f"{one}/attempt/{{attempt_id}}/events", self._post_event),
            endpoints.post("/api/models", self._register),
            self._verb("DELETE", "/api/models", self._delete_models),
            endpoints.post("/proxy/pause", lambda request: self._models.pause(request.parse_body(PauseRequest))),
            endpoints.post("/proxy/resume", lambda request: self._models.resume(), takes_body=False),
            endpoints.get("/proxy/state", lambda request: self._models.pause_state()),
            endpoints.post(_AGENTS_CALLS, self._agents_call, takes_body=False),
        ]

    def _verb(self, method: str, path: str, answer: Callable[[ApiRequest], Any]) -> BaseRoute:
        return self._endpoints.route(method, path, lambda request: self._endpoints.run(answer, request))

    def _create(self, request: ApiRequest) -> Response:
        wanted = checked(NewRollouts, {"rollouts": request.body}).rollouts
        return _created(self._rollouts.create(wanted, self._models.model()) if wanted else [])

    def _list(self, request: ApiRequest) -> Any:
        values = {**request.query, "state_in": request.query_lists.get("state_in", [])}
        query = checked(ListQuery, values)
        return self._rollouts.listing(query.state_in, query.limit)

    def _terminal(self, request: ApiRequest) -> Any:
        return self._rollouts.terminal(request.parse_query(TerminalQuery))

    def _get(self, request: ApiRequest) -> Any:
        rollout = self._rollouts.rollout(request.path["rollout_id"])
        return {"rollout": rollout, "attempts": [ATTEMPT] if rollout["status"]["last_attempt_id"] else []}

    def _patch(self, request: ApiRequest) -> Any:
        """Cancel a rollout for its client. Clients cannot change its state otherwise: the farm runs it."""
        name = request.path["rollout_id"]
        status = request.parse_body(RolloutPatch).status
        rollout = self._rollouts.rollout(name)
        if status is None or status.state is None:
            return rollout
        if status.state is LightningState.FAILED:
            return self._rollouts.cancel(name)
        now = rollout["status"]["state"]
        raise Conflict(f"Rollout {name}: cannot transition {now} -> {status.state.value}: the farm runs it")

    def _delete(self, request: ApiRequest) -> Response:
        self._rollouts.delete(request.path["rollout_id"])
        return Response(status_code=204)

    def _list_events(self, request: ApiRequest) -> Any:
        return self._events.of_rollout(request.path["rollout_id"], request.parse_query(EventsQuery))

    def _post_event(self, request: ApiRequest) -> Any:
        name, attempt = request.path["rollout_id"], request.path["attempt_id"]
        return self._events.post(name, attempt, request.parse_body(NewEvent))

    def _register(self, request: ApiRequest) -> Response:
        return _created(self._models.register(checked(ModelServers, {"models": request.body}).models))

    def _delete_models(self, request: ApiRequest) -> Any:
        self._models.delete_all()
        return {"status": "ok"}

    def _agents_call(self, request: ApiRequest) -> Any:
        raise NotFound("agents outside the farm are not proxied: the farm runs the rollouts itself, on these servers")


def _created(result: Any) -> Response:
    return Response(serialization.written(result), 201, media_type="application/json")


_SCOPES: RouteScopes = {
    ("GET", "/healthz"): Scope.READ,
    ("POST", "/api/rollouts"): Scope.SUBMIT,
    ("GET", "/api/rollouts"): Scope.READ,
    ("GET", "/api/rollouts/terminal"): Scope.READ,
    ("GET", "/api/rollouts/{rollout_id}"): Scope.READ,
    ("PATCH", "/api/rollouts/{rollout_id}"): (Scope.SUBMIT, Scope.OPERATE),
    ("DELETE", "/api/rollouts/{rollout_id}"): (Scope.SUBMIT, Scope.OPERATE),
    ("GET", "/api/rollouts/{rollout_id}/events"): Scope.READ,
    ("POST", "/api/rollouts/{rollout_id}/attempt/{attempt_id}/events"): Scope.SUBMIT,
    ("POST", "/api/models"): Scope.OPERATE,
    ("DELETE", "/api/models"): Scope.OPERATE,
    ("POST", "/proxy/pause"): Scope.OPERATE,
    ("POST", "/proxy/resume"): Scope.OPERATE,
    ("GET", "/proxy/state"): Scope.READ,
    ("POST", _AGENTS_CALLS): Scope.SUBMIT,
}

PROTOCOL = WireProtocol(lambda endpoints: _Routes(endpoints).routes(), refuse_with_detail, _SCOPES)
