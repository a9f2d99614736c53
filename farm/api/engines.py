"""Engines over HTTP: the list, and orders to them. It is the client that waits until they are followed."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from starlette.routing import Route

from farm.api.desk import Desk
from farm.api.questions import NewEngine, OneEngine, Orders, Pause, Question, SomeEngines, Version
from farm.engines import EngineState
from farm.errors import InvalidRequest
from farm.orders import MODES
from farm.store.engines import Engine, Paused


def routes(desk: Desk) -> list[Route]:
    """`/v1/engines`. Nobody is shown the engines' keys."""
    engines = desk.service.engines

    def states(asked: Question) -> list[EngineState]:
        return [replace(state, engine=_without_key(state.engine)) for state in engines.states()]

    def chosen(asked: Question) -> list[Engine]:
        return [_without_key(engine) for engine in engines.chosen(asked.told(SomeEngines).urls)]

    def add(asked: Question) -> dict[str, str]:
        engines.add(Engine(**asked.told(NewEngine).model_dump()))
        return {}

    def drain(asked: Question) -> dict[str, str]:
        engines.drain(asked.told(OneEngine).url)
        return {}

    def remove(asked: Question) -> dict[str, str]:
        engines.remove(asked.told(OneEngine).url)
        return {}

    def pause(asked: Question) -> dict[str, int]:
        told = asked.told(Pause)
        if told.mode not in ("", *MODES):
            raise InvalidRequest(f"{told.mode!r} is none of {', '.join(MODES)}", field="mode")
        return engines.order_pause(cast(Paused, told.mode), told.by, told.urls)

    def version(asked: Question) -> dict[str, int]:
        told = asked.told(Version)
        return engines.order_version(told.version, told.urls)

    def left(asked: Question) -> list[str]:
        told = asked.told(Orders)
        return engines.left(told.orders, told.waited_s)

    return [
        desk.get("/v1/engines", states),
        desk.post("/v1/engines", add),
        desk.post("/v1/engines/chosen", chosen),
        desk.post("/v1/engines/drain", drain),
        desk.post("/v1/engines/remove", remove),
        desk.post("/v1/engines/clear", lambda asked: engines.clear()),
        desk.post("/v1/engines/pause", pause),
        desk.post("/v1/engines/version", version),
        desk.post("/v1/engines/left", left),
    ]


def _without_key(engine: Engine) -> Engine:
    return replace(engine, key="")
