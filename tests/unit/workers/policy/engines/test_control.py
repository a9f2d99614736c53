from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from farm.errors import EngineError
from farm.records.engine import EngineInfo, PauseMode
from workers.policy.engines import open_engine
from workers.policy.generation import Engine, EngineAddress
from workers.testing.serving import serving

VLLM = EngineInfo(kind="vllm", control=True)
SGLANG = EngineInfo(kind="sglang", control=True)


class Noting:
    """Records its requests and answers all of them; `answers` are those that are not plain success, in order."""

    def __init__(self, **answers: list[tuple[int, Any]]) -> None:
        self.requests: list[tuple[str, Any]] = []
        self._answers = answers

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{name}", self._answer, methods=["GET", "POST"])])

    async def _answer(self, request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        content = await request.body()
        self.requests.append((f"{request.method} {request.url.path}{query}", await request.json() if content else None))
        left = self._answers.get(request.path_params["name"])
        status, body = left.pop(0) if left else (200, {"success": True, "weight_version": "7"})
        return PlainTextResponse(body, status) if isinstance(body, str) else JSONResponse(body, status)


def controlled(server: Noting, info: EngineInfo, use: Callable[[Engine], Awaitable[Any]]) -> Any:
    async def run(url: str) -> Any:
        engine = open_engine(EngineAddress(f"{url}/v1"), info, timeout_s=20.0)
        try:
            return await use(engine)
        finally:
            await engine.aclose()

    with serving(server.app()) as url:
        return asyncio.run(run(url))


async def update(engine: Engine, mode: PauseMode) -> str:
    await engine.pause(mode)
    await engine.set_version("7")
    await engine.resume()
    return await engine.version()


@pytest.mark.parametrize(("mode", "word"), [("drain", "wait"), ("keep", "keep"), ("abort", "abort")])
def test_vllm_is_paused_updated_and_resumed_in_each_mode(mode: PauseMode, word: str) -> None:
    server = Noting()
    assert controlled(server, VLLM, lambda engine: update(engine, mode)) == "7"
    assert server.requests == [
        (f"POST /pause?mode={word}", None),
        ("POST /update_weight_version", {"new_version": "7"}),
        ("POST /resume", None),
        ("GET /weight_info", None),
    ]


@pytest.mark.parametrize(("mode", "word"), [("keep", "retract"), ("abort", "abort")])
def test_sglang_never_aborts_for_a_version(mode: PauseMode, word: str) -> None:
    server = Noting()
    assert controlled(server, SGLANG, lambda engine: update(engine, mode)) == "7"
    assert server.requests == [
        ("POST /pause_generation", {"mode": word}),
        ("POST /update_weight_version", {"new_version": "7", "abort_all_requests": False}),
        ("POST /continue_generation", {}),
        ("GET /model_info", None),
    ]


def test_sglang_drains_by_waiting_until_its_cache_can_be_flushed() -> None:
    server = Noting(flush_cache=[(400, "requests are running"), (400, "requests are running"), (200, "flushed")])
    controlled(server, SGLANG, lambda engine: engine.pause("drain"))
    assert [path for path, _ in server.requests] == ["POST /flush_cache"] * 3 + ["POST /pause_generation"]
    assert server.requests[-1][1] == {"mode": "in_place"}


def test_closed_endpoint_names_the_flag_that_opens_it() -> None:
    with pytest.raises(EngineError, match=r"engine http://\S+ has no /pause.*VLLM_SERVER_DEV_MODE=1"):
        controlled(Noting(pause=[(404, "Not Found")]), VLLM, lambda engine: engine.pause("keep"))
    with pytest.raises(EngineError, match=r"has no /flush_cache .*admin key"):
        controlled(Noting(flush_cache=[(401, "who?")]), SGLANG, lambda engine: engine.pause("drain"))


def test_failed_control_call_is_an_error() -> None:
    failed = Noting(update_weight_version=[(200, {"success": False, "message": "busy loading"})])
    with pytest.raises(EngineError, match=r"did not carry out /update_weight_version.*busy loading"):
        controlled(failed, SGLANG, lambda engine: engine.set_version("7"))
    with pytest.raises(EngineError, match=r"answered 500.*boom"):
        controlled(Noting(resume=[(500, {"error": "boom"})]), VLLM, lambda engine: engine.resume())


@pytest.mark.parametrize("info", [EngineInfo(), EngineInfo(kind="vllm")])
def test_server_without_control_is_refused_as_the_farm_holds_calls_back(info: EngineInfo) -> None:
    server = Noting()
    for use in (lambda engine: engine.pause("keep"), lambda e: e.resume(), lambda e: e.set_version("1")):
        with pytest.raises(EngineError, match="the farm holds calls back"):
            controlled(server, info, use)
    assert controlled(server, info, lambda engine: engine.version()) == ""
    assert not server.requests


@pytest.mark.parametrize(
    ("info", "answers", "well"),
    [
        (VLLM, {"health": [(200, "")]}, True),
        (VLLM, {"health": [(503, "")]}, False),
        (EngineInfo(), {"health": [(404, "")]}, True),
        (SGLANG, {"ready": [(200, "")], "health": [(503, "")]}, True),
        (SGLANG, {"ready": [(503, "")]}, False),
        (SGLANG, {"ready": [(404, "")], "health": [(503, "")]}, False),
    ],
)
def test_health_follows_the_answer_of_the_health_endpoint(
    info: EngineInfo, answers: dict[str, Any], well: bool
) -> None:
    assert controlled(Noting(**answers), info, lambda engine: engine.healthy()) is well
