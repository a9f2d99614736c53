from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from farm.errors import EngineError, LimitReached
from farm.request import SamplingParams
from farm.rollout import Outcome
from farm.trajectory import Message, ModelCall, segments
from workers.interfaces import Completion
from workers.policy.engines import ChatEngine, EngineAddress
from workers.testing import calling
from workers.testing.book import Play, PlayBook, Problem, ScriptedCall, Turn
from workers.testing.scripted import MODEL, ScriptedServer
from workers.testing.serving import serving

ASKED: list[Message] = [{"role": "user", "content": "What is 2 + 2?"}]
TURNS = (
    Turn(content="I count ✓", tool_calls=(ScriptedCall(name="python", arguments={"code": "2 + 2"}),)),
    Turn(content="It is 4."),
)
BOOK = [Problem(match="2 + 2", plays=(Play(name="only", turns=TURNS),))]
PLAIN = {
    "choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}
Reply = Callable[[dict[str, Any]], Response]


class Misbehaving:
    """An engine that answers as a test says; `bodies` holds what it was sent."""

    def __init__(self, *replies: Reply) -> None:
        self._replies = replies
        self.bodies: list[dict[str, Any]] = []

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        return self._replies[min(len(self.bodies), len(self._replies)) - 1](body)


def refuse(status: int, body: Any) -> Reply:
    return lambda _: JSONResponse(body, status_code=status, headers={"retry-after-ms": "1"})


def accept(**choice: Any) -> Reply:
    return lambda _: JSONResponse({**PLAIN, "choices": [{**PLAIN["choices"][0], **choice}]})  # type: ignore[index]


def using(url: str, use: Callable[[ChatEngine], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        engine = ChatEngine(EngineAddress(f"{url}/v1", **options), timeout_s=20)
        try:
            return await use(engine)
        finally:
            await engine.aclose()

    return asyncio.run(run())


def ask(misbehaving: Misbehaving, sampling: SamplingParams | None = None, n: int = 1) -> Completion:
    async def use(engine: ChatEngine) -> Completion:
        for _ in range(n):
            completion = await engine.complete(ASKED, [], sampling or SamplingParams(), 100)
        return completion

    with serving(misbehaving.app()) as url:
        completion: Completion = using(url, use, model="m")
        return completion


@pytest.fixture
def scripted() -> Iterator[str]:
    with serving(ScriptedServer(PlayBook(BOOK), seed=1).app()) as url:
        yield url


async def play(engine: ChatEngine) -> list[ModelCall]:
    """Both turns of the book's play, as an agent would record them."""
    history, calls = list(ASKED), []
    for index in range(2):
        completion = await engine.complete(history, [], SamplingParams(), 1000)
        calls.append(
            ModelCall(
                index,
                [],
                completion.message,
                completion.finish_reason,
                completion.engine,
                0.0,
                0.0,
                completion.n_prompt_tokens,
                completion.n_response_tokens,
                completion.policy_version,
                completion.prompt_ids,
                completion.response_ids,
                completion.response_logprobs,
            )
        )
        history += [completion.message, {"role": "tool", "tool_call_id": "call_0_0", "content": "4"}]
    return calls


def test_two_turns_make_one_token_exact_segment(scripted: str) -> None:
    calls = using(scripted, play)
    assert [call.finish_reason for call in calls] == ["tool_calls", "stop"]
    assert all(call.token_exact for call in calls)
    (segment,) = segments(calls)
    assert segment.response_mask.sum() == sum(call.n_response_tokens for call in calls)
    assert (segment.response_logprobs[segment.response_mask == 1] < 0).all()
    assert set(segment.policy_versions[segment.response_mask == 1]) == {0}


def test_an_empty_model_takes_the_first_listed(scripted: str) -> None:
    assert using(scripted, lambda engine: engine.model()) == MODEL


def test_tool_calls_keep_their_text(scripted: str) -> None:
    (first, _) = using(scripted, play)
    (call,) = first.response["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"code": "2 + 2"}


def test_what_is_sent() -> None:
    server = Misbehaving(accept())
    ask(server, SamplingParams(temperature=0.3, top_p=0.9, top_k=5, stop=("END",), seed=11))
    (body,) = server.bodies
    sampling = {"temperature": 0.3, "top_p": 0.9, "top_k": 5, "stop": ["END"], "seed": 11, "max_tokens": 100}
    recording = {"logprobs": True, "return_token_ids": True, "return_weight_versions": True}
    assert body == {"model": "m", "messages": ASKED, **sampling, **recording}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_busy_engines_are_asked_again(status: int) -> None:
    server = Misbehaving(refuse(status, {"error": "busy"}), accept())
    assert ask(server).message["content"] == "hi"
    assert len(server.bodies) == 2


@pytest.mark.parametrize("status", [429, 500])
def test_engines_that_stay_broken_are_an_error(status: int) -> None:
    server = Misbehaving(refuse(status, {"error": {"message": "out of memory"}}))
    with pytest.raises(
        EngineError, match=rf"http://127.0.0.1:\d+/v1 answered {status}.*out of memory.*look at its log"
    ):
        ask(server)
    assert len(server.bodies) == 3


def test_no_engine_there() -> None:
    with serving(Misbehaving(accept()).app()) as url:
        pass
    with pytest.raises(EngineError, match=r"cannot be reached.*is it running"):
        using(url, lambda engine: engine.complete(ASKED, [], SamplingParams(), 10), model="m")


def test_a_wrong_key_says_so() -> None:
    with pytest.raises(EngineError, match="check the engine's API key"):
        ask(Misbehaving(refuse(401, {"error": "Unauthorized"})))


@pytest.mark.parametrize("status", [400, 422])
def test_servers_that_refuse_our_fields_are_remembered_as_plain(status: int) -> None:
    refusal = {"error": {"message": "Unexpected fields in the request: {'return_token_ids'}"}}

    def reply(body: dict[str, Any]) -> Response:
        return refuse(status, refusal)(body) if "return_token_ids" in body else accept()(body)

    server = Misbehaving(reply)
    completion = ask(server, n=2)
    assert completion.prompt_ids is None
    assert ["return_token_ids" in body for body in server.bodies] == [True, False, False]


def test_a_sampling_field_that_is_refused_is_never_dropped() -> None:
    refusal = refuse(422, {"error": {"message": "Unexpected fields in the request: {'top_k'}"}})
    with pytest.raises(EngineError, match="check the sampling parameters"):
        ask(Misbehaving(refusal), SamplingParams(top_k=5))


@pytest.mark.parametrize(
    "error",
    [
        {"message": "too long", "param": "input_tokens", "code": 400},
        {"message": "This model's maximum context length is 10 tokens. Your request has 12 input tokens."},
        {"message": "x", "code": "context_length_exceeded"},
        {"message": "the request exceeds the available context size", "type": "exceed_context_size_error"},
        {"message": "The input (12 tokens) is longer than the model's context length (10 tokens)."},
    ],
)
def test_a_full_context_is_a_limit(error: dict[str, Any]) -> None:
    with pytest.raises(LimitReached) as limit:
        ask(Misbehaving(refuse(400, {"error": error})))
    assert limit.value.outcome is Outcome.CONTEXT_FULL


def test_too_large_a_max_tokens_is_made_to_fit() -> None:
    message = (
        "This model's maximum context length is 60 tokens. However, you requested 112 tokens (12 in the messages, "
    )
    server = Misbehaving(refuse(400, {"error": {"message": message + "100 in the completion)."}}), accept())
    assert ask(server).message["content"] == "hi"
    assert [body["max_tokens"] for body in server.bodies] == [100, 48]


def test_the_scripted_server_refuses_a_full_context() -> None:
    with (
        serving(ScriptedServer(PlayBook(BOOK), context_tokens=8).app()) as url,
        pytest.raises(LimitReached, match="maximum context length"),
    ):
        using(url, lambda engine: engine.complete(ASKED, [], SamplingParams(), 10))


@pytest.mark.parametrize("body", ["<html>busy</html>", '{"choices": []}', "[]", "null"])
def test_no_completion_is_an_engine_error(body: str) -> None:
    with pytest.raises(EngineError, match="gave an answer"):
        ask(Misbehaving(lambda _: PlainTextResponse(body, media_type="application/json")))


def test_an_aborted_generation_is_asked_for_again() -> None:
    server = Misbehaving(accept(finish_reason="abort"), accept())
    assert ask(server).finish_reason == "stop"
    with pytest.raises(EngineError, match="aborted"):
        ask(Misbehaving(accept(finish_reason="abort")))


def test_malformed_arguments_are_wrapped_for_servers_that_parse_them() -> None:
    def reply(body: dict[str, Any]) -> Response:
        try:
            json.loads(body["messages"][1]["tool_calls"][0]["function"]["arguments"])
        except ValueError as error:
            return refuse(400, {"error": {"message": str(error)}})(body)
        return accept()(body)

    async def use(engine: ChatEngine) -> Completion:
        history = [*ASKED, calling(("python", "{not json")).message]
        return await engine.complete(history, [], SamplingParams(), 10)

    server = Misbehaving(reply)
    with serving(server.app()) as url:
        assert using(url, use, model="m").message["content"] == "hi"
    assert len(server.bodies) == 2


def test_concurrent_calls_to_a_plain_server_all_succeed() -> None:
    refusal = {"error": {"message": "Unexpected fields in the request: {'return_token_ids'}"}}

    async def use(engine: ChatEngine) -> list[Completion]:
        return await asyncio.gather(*[engine.complete(ASKED, [], SamplingParams(), 10) for _ in range(5)])

    server = Misbehaving(lambda body: refuse(422, refusal)(body) if "return_token_ids" in body else accept()(body))
    with serving(server.app()) as url:
        assert len(using(url, use, model="m")) == 5
