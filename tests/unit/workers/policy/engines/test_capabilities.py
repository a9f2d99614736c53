from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from farm.errors import EngineError
from farm.records.engine import EngineInfo
from tests.doubles import EngineDouble
from workers.policy.engines import detect
from workers.policy.generation import EngineAddress, EngineBusy, EngineRefused, EngineUnfit
from workers.testing.serving import serving

MODELS = {"data": [{"id": "a", "owned_by": "me"}, {"id": "b", "max_model_len": 512, "root": "/models/b"}]}
Answer = Callable[[dict[str, Any]], Response]


def looked_at(app: Starlette, **address: Any) -> EngineInfo:
    with serving(app) as url:
        return asyncio.run(detect(EngineAddress(f"{url}/v1", **address)))


def double(**made: Any) -> EngineInfo:
    return looked_at(EngineDouble(**made, context_tokens=4096).app())


def plain(completions: Answer | None = None, chat: Answer | None = None, models: Any = MODELS) -> Starlette:
    """A server on which only the named endpoints work."""

    def route(path: str, answer: Answer | None) -> Route:
        async def respond(request: Request) -> Response:
            return answer(await request.json()) if answer else JSONResponse({"error": "no"}, 404)

        return Route(path, respond, methods=["POST"])

    async def listed(request: Request) -> Response:
        return JSONResponse(models) if models is not None else JSONResponse({"error": "broken"}, 500)

    routes = [route("/v1/completions", completions), route("/v1/chat/completions", chat), Route("/v1/models", listed)]
    return Starlette(routes=routes)


def refusing(status: int, text: str = "no", **headers: str) -> Answer:
    return lambda _: JSONResponse({"error": {"message": text}}, status, headers=headers)


def hello(_: dict[str, Any]) -> Response:
    choice = {"message": {"role": "assistant", "content": "hi"}, "finish_reason": "length"}
    return JSONResponse({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})


def test_vllm_with_all_its_flags() -> None:
    engine_info = double(version="0.33.0")
    assert (engine_info.kind, engine_info.version, engine_info.token_in) == ("vllm", "0.33.0", "generate")
    assert engine_info.token_out
    assert engine_info.control
    assert (engine_info.logprobs, engine_info.context_tokens, engine_info.notes) == ("raw", 4096, ())
    assert engine_info.root


def test_vllm_without_its_flags_names_the_flags_to_set() -> None:
    engine_info = double(scale_out=False, control=False)
    assert engine_info.token_in == "completions"
    assert not engine_info.control
    assert any("VLLM_SERVER_DEV_MODE=1" in note for note in engine_info.notes)
    assert any("--enable-scale-out" in note for note in engine_info.notes)


def test_capabilities_of_sglang_are_detected() -> None:
    engine_info = double(wire="sglang")
    assert (engine_info.kind, engine_info.token_in, engine_info.logprobs) == ("sglang", "sglang", "processed")
    assert engine_info.control
    assert engine_info.context_tokens == 4096


def test_plain_server_is_text_only() -> None:
    engine_info = looked_at(plain(chat=hello))
    assert (engine_info.kind, engine_info.model, engine_info.token_in, engine_info.token_out) == (
        "openai",
        "a",
        "",
        False,
    )
    assert any("no token ids" in note for note in engine_info.notes)


def test_named_model_is_the_probed_one() -> None:
    engine_info = looked_at(plain(chat=hello), model="b")
    assert (engine_info.model, engine_info.context_tokens, engine_info.root) == ("b", 512, "/models/b")


def test_unlisted_model_is_reported() -> None:
    engine_info = looked_at(plain(chat=hello), model="c")
    assert engine_info.model == "c"
    assert any("does not list c; it has a, b" in note for note in engine_info.notes)


def test_plain_server_that_fails_with_ids_is_text_only() -> None:
    engine_info = looked_at(plain(completions=refusing(500), chat=hello))
    assert not engine_info.token_in
    assert not any("chat fails" in note for note in engine_info.notes)


def test_server_whose_chat_fails_is_reported() -> None:
    engine_info = looked_at(plain())
    assert any("its chat fails, too" in note for note in engine_info.notes)


def test_server_without_a_model_list_needs_a_model_name() -> None:
    assert looked_at(plain(chat=hello, models=None), model="c").model == "c"
    with pytest.raises(EngineError, match="lists no model; check the address"):
        looked_at(plain(chat=hello, models=None))


def test_busy_server_is_not_probed_as_limited() -> None:
    with pytest.raises(EngineBusy):
        looked_at(plain(completions=refusing(429, **{"retry-after": "3"}), chat=hello))
    with pytest.raises(EngineBusy):
        looked_at(plain(chat=refusing(503)))


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/is_paused"])
def test_server_that_is_busy_at_identification_is_not_probed_as_limited(path: str) -> None:
    """A vLLM that timed out on the pause query was once classified as unable to pause, permanently."""
    app = EngineDouble().app()

    async def busy_there(scope: Any, receive: Any, send: Any) -> None:
        respond = JSONResponse({"error": "later"}, 503) if scope.get("path") == path else app
        await respond(scope, receive, send)

    with pytest.raises(EngineBusy):
        looked_at(busy_there, model="scripted")  # type: ignore[arg-type]


def test_server_that_is_slow_to_report_its_pause_is_not_probed_as_limited() -> None:
    app = EngineDouble().app()

    async def silent_there(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") != "/is_paused":
            await app(scope, receive, send)
        else:
            await receive()
            await receive()

    with serving(silent_there) as url, pytest.raises(EngineError, match="time"):  # type: ignore[arg-type]
        asyncio.run(detect(EngineAddress(f"{url}/v1"), timeout_s=1.0))


@pytest.mark.parametrize("fault", ["500", "reset"])
def test_failing_server_is_not_probed_as_limited(fault: str) -> None:
    engine = EngineDouble()
    engine.fail_next(fault)
    with pytest.raises(EngineError, match=r"answered 500|broke off"):
        looked_at(engine.app())


def test_paused_engine_cannot_be_probed() -> None:
    engine = EngineDouble()

    async def detect_paused(url: str) -> None:
        await engine.scheduler.pause("keep")
        await detect(EngineAddress(f"{url}/v1"))

    with serving(engine.app()) as url, pytest.raises(EngineError, match=r"is paused .*resume it"):
        asyncio.run(detect_paused(url))


def test_wrong_key_is_refused() -> None:
    engine = EngineDouble(key="right")
    with pytest.raises(EngineRefused, match="API key"):
        looked_at(engine.app(), key="wrong")
    assert looked_at(engine.app(), key="right").token_in == "generate"


def test_repeated_key_is_not_shown() -> None:
    async def listed(request: Request) -> Response:
        return JSONResponse({"error": {"message": f"who is {request.headers['authorization']}?"}}, 401)

    with pytest.raises(EngineUnfit, match=r"who is Bearer \*\*\*"):
        looked_at(Starlette(routes=[Route("/v1/models", listed)]), key="sk-12345")


def test_missing_model_does_not_make_an_engine_limited() -> None:
    with pytest.raises(EngineUnfit, match="does not have this model"):
        looked_at(EngineDouble().app(), model="missing")


def test_plain_server_without_the_model_is_unfit() -> None:
    gone = refusing(404, "The model `c` does not exist.")
    with pytest.raises(EngineUnfit, match="does not have this model"):
        looked_at(plain(completions=gone, chat=gone), model="c")


def test_redirect_names_the_new_address() -> None:
    async def listed(request: Request) -> Response:
        return Response(status_code=308, headers={"location": "https://b/v1/models"})

    with pytest.raises(EngineError, match=r"it is at https://b/v1/models: name that address"):
        looked_at(Starlette(routes=[Route("/v1/models", listed)]))


def test_html_page_is_not_an_engine() -> None:
    async def page(request: Request) -> Response:
        return Response("<html>welcome</html>", media_type="text/html")

    with pytest.raises(EngineError, match="lists no model; check the address"):
        looked_at(Starlette(routes=[Route("/{path:path}", page)]))


def test_endless_answer_times_out() -> None:
    async def listed(request: Request) -> Response:
        async def drip() -> AsyncIterator[bytes]:
            while True:
                yield b" "
                await asyncio.sleep(0.01)

        return StreamingResponse(drip())

    app = Starlette(routes=[Route("/v1/models", listed)])
    with serving(app) as url, pytest.raises(EngineError, match="did not answer in time"):
        asyncio.run(detect(EngineAddress(f"{url}/v1"), timeout_s=0.1))


def test_unreachable_address_is_an_engine_error() -> None:
    with serving(plain()) as url:
        pass
    with pytest.raises(EngineError, match=r"cannot be reached.*is it running"):
        asyncio.run(detect(EngineAddress(f"{url}/v1")))
