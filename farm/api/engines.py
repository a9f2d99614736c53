"""Engines over HTTP: the list, which never shows their keys, and orders to them.

Clients wait until their orders are executed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from farm.api.endpoints import EndpointTable, ListPage, page_after
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
from farm.client.local import LocalFarm
from farm.client.weight_update import MODES
from farm.errors import InvalidRequest
from farm.records.engine_state import EngineState, Paused, StoredEngine

_OF_RUNS = (Scope.SUBMIT, Scope.OPERATE)
"""The scopes of which one is needed to change engines; with only `submit`, those of training runs (`llm_engines`)."""
ENDPOINTS = EndpointTable()


@ENDPOINTS.add("GET", "/v1/engines", "The engines, without their keys.", Scope.READ)
def states(farm: LocalFarm, query: AfterQuery) -> ListPage[EngineState]:
    shown = [replace(state, engine=_without_key(state.engine)) for state in farm.engines()]
    return page_after(shown, query.limit, query.after, lambda state: state.engine.url)


@ENDPOINTS.add("POST", "/v1/engines", "Add an engine; with only `submit`, one of a training run.", _OF_RUNS)
def add_engine(farm: LocalFarm, body: NewEngine) -> dict[str, str]:
    farm.add_engine(**body.model_dump())
    return {}


@ENDPOINTS.add("POST", "/v1/engines/chosen", "The engines that an order applies to.", Scope.READ)
def chosen(farm: LocalFarm, body: SomeEngines) -> list[StoredEngine]:
    return [_without_key(engine) for engine in farm.orders.chosen(body.urls)]


@ENDPOINTS.add("POST", "/v1/engines/drain", "Drain an engine: it gets no new rollouts.", Scope.OPERATE)
def drain_engine(farm: LocalFarm, body: OneEngine) -> dict[str, str]:
    farm.drain_engine(body.url)
    return {}


@ENDPOINTS.add("POST", "/v1/engines/remove", "Remove an engine.", _OF_RUNS)
def remove_engine(farm: LocalFarm, body: OneEngine) -> dict[str, str]:
    farm.remove_engine(body.url)
    return {}


@ENDPOINTS.add("POST", "/v1/engines/clear", "Remove all engines.", Scope.OPERATE, body=ClearOrder)
def clear_engines(farm: LocalFarm, request: ApiRequest) -> int:
    return farm.clear_engines(bool(request.data) and request.parse_body(ClearOrder).forget_weights)


@ENDPOINTS.add("POST", "/v1/engines/pause", "Pause or resume engines.", Scope.OPERATE)
def pause(farm: LocalFarm, body: PauseOrder) -> dict[str, int]:
    if body.mode not in ("", *MODES):
        raise InvalidRequest(f"{body.mode!r} must be one of {', '.join(MODES)}", field="mode")
    return farm.orders.order_pause(cast(Paused, body.mode), body.by, body.urls, body.held)


@ENDPOINTS.add("POST", "/v1/engines/hold", "Send a heartbeat during a weight update.", Scope.OPERATE)
def hold(farm: LocalFarm, body: HoldOrder) -> dict[str, str]:
    farm.orders.hold(body.by, body.urls)
    return {}


@ENDPOINTS.add("GET", "/v1/engines/version", "The newest named weights.", Scope.READ)
def newest_version(farm: LocalFarm) -> str:
    return farm.newest_version()


@ENDPOINTS.add("POST", "/v1/engines/version", "Name the weights of engines.", Scope.OPERATE)
def name_version(farm: LocalFarm, body: VersionOrder) -> dict[str, int]:
    return farm.orders.order_version(body.version, body.urls, body.path)


@ENDPOINTS.add("POST", "/v1/engines/left", "The processes that have not followed orders.", Scope.READ)
def left(farm: LocalFarm, body: OrdersQuery) -> list[str]:
    return farm.orders.left(body.orders, body.waited_s)


def _without_key(engine: StoredEngine) -> StoredEngine:
    return replace(engine, key="")
