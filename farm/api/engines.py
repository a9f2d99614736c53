"""Engines over HTTP: the list, and orders to them. Clients wait until their orders are executed."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from starlette.routing import Route

from farm.api.endpoints import Endpoints, ListPage, page_after
from farm.api.openapi import Described, EndpointDescription
from farm.api.schemas import (
    AfterQuery,
    ApiRequest,
    ClearOrder,
    HoldOrder,
    NewEngine,
    OneEngine,
    OrdersQuery,
    PauseOrder,
    SomeEngines,
    VersionOrder,
)
from farm.callers import Scope
from farm.client.weight_update import MODES
from farm.errors import InvalidRequest
from farm.records.engine_state import EngineState, Paused, StoredEngine

_OF_RUNS = (Scope.SUBMIT, Scope.OPERATE)
"""The scopes of which one is needed to change engines; with only `submit`, those of training runs (`llm_engines`)."""
ENDPOINTS: Described = {
    ("GET", "/v1/engines"): EndpointDescription(
        "The engines, without their keys.", list[EngineState], AfterQuery, scope=Scope.READ
    ),
    ("POST", "/v1/engines"): EndpointDescription(
        "Add an engine; with only `submit`, one of a training run.", dict[str, str], body=NewEngine, scope=_OF_RUNS
    ),
    ("POST", "/v1/engines/chosen"): EndpointDescription(
        "The engines that an order applies to.", list[StoredEngine], body=SomeEngines, scope=Scope.READ
    ),
    ("POST", "/v1/engines/drain"): EndpointDescription(
        "Drain an engine: it gets no new rollouts.", dict[str, str], body=OneEngine, scope=Scope.OPERATE
    ),
    ("POST", "/v1/engines/remove"): EndpointDescription(
        "Remove an engine.", dict[str, str], body=OneEngine, scope=_OF_RUNS
    ),
    ("POST", "/v1/engines/clear"): EndpointDescription(
        "Remove all engines.", int, body=ClearOrder, scope=Scope.OPERATE
    ),
    ("POST", "/v1/engines/pause"): EndpointDescription(
        "Pause or resume engines.", dict[str, int], body=PauseOrder, scope=Scope.OPERATE
    ),
    ("POST", "/v1/engines/hold"): EndpointDescription(
        "Send a heartbeat during a weight update.", dict[str, str], body=HoldOrder, scope=Scope.OPERATE
    ),
    ("GET", "/v1/engines/version"): EndpointDescription("The newest named weights.", str, scope=Scope.READ),
    ("POST", "/v1/engines/version"): EndpointDescription(
        "Name the weights of engines.", dict[str, int], body=VersionOrder, scope=Scope.OPERATE
    ),
    ("POST", "/v1/engines/left"): EndpointDescription(
        "The processes that have not followed orders.", list[str], body=OrdersQuery, scope=Scope.READ
    ),
}


def routes(endpoints: Endpoints) -> list[Route]:
    """Return the routes of `/v1/engines`, which never show the engines' keys."""
    farm = endpoints.farm

    def states(request: ApiRequest) -> ListPage:
        query = request.parse_query(AfterQuery)
        shown = [replace(state, engine=_without_key(state.engine)) for state in farm.engines()]
        return page_after(shown, query.limit, query.after, lambda state: state.engine.url)

    def chosen(request: ApiRequest) -> list[StoredEngine]:
        return [_without_key(engine) for engine in farm.orders.chosen(request.parse_body(SomeEngines).urls)]

    def add(request: ApiRequest) -> dict[str, str]:
        farm.add_engine(**request.parse_body(NewEngine).model_dump())
        return {}

    def drain(request: ApiRequest) -> dict[str, str]:
        farm.drain_engine(request.parse_body(OneEngine).url)
        return {}

    def remove(request: ApiRequest) -> dict[str, str]:
        farm.remove_engine(request.parse_body(OneEngine).url)
        return {}

    def clear(request: ApiRequest) -> int:
        return farm.clear_engines(bool(request.data) and request.parse_body(ClearOrder).forget_weights)

    def pause(request: ApiRequest) -> dict[str, int]:
        pause_order = request.parse_body(PauseOrder)
        if pause_order.mode not in ("", *MODES):
            raise InvalidRequest(f"{pause_order.mode!r} must be one of {', '.join(MODES)}", field="mode")
        mode = cast(Paused, pause_order.mode)
        return farm.orders.order_pause(mode, pause_order.by, pause_order.urls, pause_order.held)

    def version(request: ApiRequest) -> dict[str, int]:
        pause_order = request.parse_body(VersionOrder)
        return farm.orders.order_version(pause_order.version, pause_order.urls, pause_order.path)

    def hold(request: ApiRequest) -> dict[str, str]:
        pause_order = request.parse_body(HoldOrder)
        farm.orders.hold(pause_order.by, pause_order.urls)
        return {}

    def left(request: ApiRequest) -> list[str]:
        pause_order = request.parse_body(OrdersQuery)
        return farm.orders.left(pause_order.orders, pause_order.waited_s)

    return [
        endpoints.get("/v1/engines", states),
        endpoints.post("/v1/engines", add),
        endpoints.post("/v1/engines/chosen", chosen),
        endpoints.post("/v1/engines/drain", drain),
        endpoints.post("/v1/engines/remove", remove),
        endpoints.post("/v1/engines/clear", clear),
        endpoints.post("/v1/engines/pause", pause),
        endpoints.get("/v1/engines/version", lambda request: farm.newest_version()),
        endpoints.post("/v1/engines/version", version),
        endpoints.post("/v1/engines/hold", hold),
        endpoints.post("/v1/engines/left", left),
    ]


def _without_key(engine: StoredEngine) -> StoredEngine:
    return replace(engine, key="")
