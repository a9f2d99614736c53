from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from farm.errors import EngineError, LimitReached
from farm.records.engine import EngineInfo
from farm.records.request import SamplingParams
from farm.records.trajectory import token_ids
from workers.policy.engines import open_engine
from workers.policy.generation import EngineAddress, EngineBusy, EngineRefused, Generation
from workers.testing.serving import serving

PROMPT = token_ids([1, 2, 3])
META = {"completion_tokens": 1, "output_token_logprobs": [[-0.5, 4, None]], "finish_reason": {"type": "length"}}
ANSWER = {"output_ids": [4], "meta_info": META}
TOO_LONG = (
    "Requested token count exceeds the model's maximum context length of 60 tokens. You requested a total of 103 "
    "tokens: 3 tokens from the input messages and 100 tokens for the completion."
)


class _Server:
    """An SGLang with scripted answers: a status and a body, or the events of a stream."""

    def __init__(self, *answers: tuple[int, Any] | list[Any]) -> None:
        self._answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    def app(self) -> Starlette:
        models = JSONResponse({"object": "list", "data": [{"id": "listed", "object": "model"}]})
        routes = [Route("/generate", self._generate, methods=["POST"]), Route("/v1/models", lambda _: models)]
        return Starlette(routes=routes)

    async def _generate(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        answer = self._answers.pop(0)
        if isinstance(answer, tuple):
            return JSONResponse(answer[1], answer[0])
        data = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in answer) + b"data: [DONE]\n\n"
        return Response(data, media_type="text/event-stream")


def generated(server: _Server, n: int = 100, **more: Any) -> Generation:
    async def run(url: str) -> Generation:
        info = EngineInfo(kind="sglang", token_in="sglang", model="m", **more.pop("info", {}))
        engine = open_engine(EngineAddress(f"{url}/v1"), info, timeout_s=20.0)
        try:
            generation: Generation = await engine.generate(PROMPT, SamplingParams(), n, **more)
            return generation
        finally:
            await engine.aclose()

    with serving(server.app()) as url:
        return asyncio.run(run(url))


def test_request_is_limited_to_the_free_context() -> None:
    server = _Server((200, ANSWER))
    generated(server, info={"context_tokens": 10})
    assert server.bodies[0]["sampling_params"]["max_new_tokens"] == 7
    with pytest.raises(LimitReached, match="a prompt of 3 tokens in a context of 3"):
        generated(_Server(), info={"context_tokens": 3})


def test_engine_that_counts_the_answer_is_asked_for_fewer_tokens() -> None:
    server = _Server((400, {"error": {"message": TOO_LONG}}), (200, ANSWER))
    assert generated(server).response_ids.tolist() == [4]
    assert [body["sampling_params"]["max_new_tokens"] for body in server.bodies] == [100, 57]


def test_request_is_reduced_only_once() -> None:
    refusal = (400, {"error": {"message": TOO_LONG}})
    with pytest.raises(LimitReached):
        generated(_Server(refusal, refusal))


def test_session_id_is_sent_for_routers() -> None:
    server = _Server((200, ANSWER), (200, ANSWER))
    generated(server, session_id="r1/0")
    generated(server)
    assert [headers.get("x-session-id") for headers in server.headers] == ["r1/0", None]


def test_pieces_are_reported_as_they_arrive() -> None:
    two = {"completion_tokens": 2, "output_token_logprobs": [[-0.5, 4, None], [-0.1, 5, None]]}
    first = {"output_ids": [4], "meta_info": META | {"finish_reason": None}}
    last = {"output_ids": [4, 5], "meta_info": META | two}
    pieces: list[list[int]] = []
    generation = generated(_Server([first, last]), on_ids=lambda ids: pieces.append(list(ids)))
    assert pieces == [[4], [5]]
    assert generation.response_ids.tolist() == [4, 5]


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ({"error": {"message": "engine died", "code": 500}}, EngineError),
        ({"error": {"message": "engine died"}}, EngineError),
        ({"error": "engine died"}, EngineError),
        ({"error": {"message": "engine died", "code": 503}}, EngineBusy),
        ({"error": {"message": "engine died", "code": 400}}, EngineRefused),
        ({"meta_info": {"finish_reason": {"type": "abort", "message": "engine died", "status_code": 503}}}, EngineBusy),
        (
            {"meta_info": {"finish_reason": {"type": "abort", "message": "engine died", "status_code": 400}}},
            EngineRefused,
        ),
    ],
)
def test_late_error_is_mapped_like_its_status(event: dict[str, Any], error: type[EngineError]) -> None:
    with pytest.raises(EngineError, match="engine died") as failure:
        generated(_Server([ANSWER, event]), on_ids=lambda ids: None)
    assert type(failure.value) is error


def test_abort_without_a_status_keeps_sampled_tokens() -> None:
    meta = META | {"finish_reason": {"type": "abort", "message": "paused", "status_code": None}}
    generation = generated(_Server((200, ANSWER | {"meta_info": meta})))
    assert (generation.finish_reason, generation.response_ids.tolist()) == ("abort", [4])


@pytest.mark.parametrize("answer", [[], "text", {}, {"output_ids": 3, "meta_info": {}}, {"meta_info": META}, None])
def test_malformed_answer_is_an_engine_error(answer: Any) -> None:
    with pytest.raises(EngineError, match="does not add up"):
        generated(_Server((200, answer)))


def test_server_without_a_wire_for_ids_is_not_called() -> None:
    async def run() -> None:
        engine = open_engine(EngineAddress("http://127.0.0.1:1/v1"), EngineInfo())
        with pytest.raises(EngineRefused, match="accepts no token ids"):
            await engine.generate(PROMPT, SamplingParams(), 5)
        await engine.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "127.0.0.1:1/v1", "http://[nonsense/v1", "ftp://x/v1"])
def test_unreachable_address_is_an_error_and_unhealthy(url: str) -> None:
    async def run() -> None:
        engine = open_engine(EngineAddress(url, model="m"), EngineInfo(kind="vllm", token_in="generate"), timeout_s=5.0)
        with pytest.raises(EngineError, match=r"cannot be reached.*is the address right"):
            await engine.generate(PROMPT, SamplingParams(), 5)
        assert not await engine.healthy()
        await engine.aclose()

    asyncio.run(run())
