from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route

from farm.errors import EngineError, LimitReached
from farm.records.engine import EngineInfo
from farm.records.request import SamplingParams
from farm.records.rollout import Outcome
from farm.records.trajectory import Message
from tests.doubles.drawn_images import png, url_of
from workers.plugins.interfaces import Completion
from workers.policy.answer_form import FormedSampling
from workers.policy.engines import open_engine
from workers.policy.generation import ChatRequest, Engine, EngineAddress, EngineBusy, EngineRefused, ImagesRefused
from workers.policy.message_images import Picture, PicturePart
from workers.testing import calling
from workers.testing.serving import serving

PROMPT: list[Message] = [{"role": "user", "content": "What is 2 + 2?"}]
PLAIN = {
    "choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}
Reply = Callable[[dict[str, Any]], Response]


class Misbehaving:
    """An engine that answers as a test sets; `bodies` holds the received requests."""

    def __init__(self, *replies: Reply) -> None:
        self._replies = replies
        self.bodies: list[dict[str, Any]] = []

    def app(self, path: str = "/v1/chat/completions") -> Starlette:
        return Starlette(routes=[Route(path, self._chat, methods=["POST"])])

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        return self._replies[min(len(self.bodies), len(self._replies)) - 1](body)


def refuse(status: int, body: Any) -> Reply:
    return lambda _: JSONResponse(body, status_code=status, headers={"retry-after": "7"})


def accept(**choice: Any) -> Reply:
    return lambda _: JSONResponse({**PLAIN, "choices": [{**PLAIN["choices"][0], **choice}]})  # type: ignore[index]


def using(url: str, use: Callable[[Engine], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        engine = open_engine(EngineAddress(f"{url}/v1", **options), EngineInfo(), timeout_s=20)
        try:
            return await use(engine)
        finally:
            await engine.aclose()

    return asyncio.run(run())


def ask(misbehaving: Misbehaving, sampling: SamplingParams | None = None, n: int = 1, **more: Any) -> Completion:
    async def use(engine: Engine) -> Completion:
        for _ in range(n):
            completion = await engine.chat(ChatRequest(PROMPT, 100, sampling or SamplingParams(), **more))
        return completion

    with serving(misbehaving.app()) as url:
        completion: Completion = using(url, use, model="m")
        return completion


def test_request_body_has_the_sampling_and_recording_fields() -> None:
    server = Misbehaving(accept())
    sampling = {"temperature": 0.3, "top_p": 0.9, "top_k": 5, "stop": ["END"], "seed": 11, "min_p": 0.1}
    sampling |= {"presence_penalty": 1.0, "stop_token_ids": [7], "min_tokens": 2, "cache_salt": "7"}
    ask(server, SamplingParams.model_validate(sampling))
    (body,) = server.bodies
    sampling |= {"max_tokens": 100}
    recording = {"logprobs": True, "return_token_ids": True, "return_weight_versions": True}
    assert body == {"model": "m", "messages": PROMPT, **sampling, **recording}


def test_optional_output_format_is_dropped_if_a_server_refuses_it() -> None:
    form = {"tool_choice": "required", "answer_schema": {"type": "object"}}
    server = Misbehaving(refuse(400, {"error": {"message": "no tool parser"}}), accept())
    ask(server, FormedSampling.model_validate(form))
    first, second = server.bodies
    assert first["tool_choice"] == "required"
    assert first.keys() - second.keys() == {"tool_choice", "response_format"}
    server = Misbehaving(refuse(400, {"error": {"message": "no tool parser"}}))
    with pytest.raises(EngineRefused):
        ask(server, FormedSampling.model_validate({**form, "required": True}))


def test_template_variables_and_another_model() -> None:
    server = Misbehaving(accept())
    ask(server, SamplingParams(temperature=None), template_kwargs={"enable_thinking": False}, model="lora")
    (body,) = server.bodies
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["model"] == "lora"
    assert "temperature" not in body


@pytest.mark.parametrize("status", [429, 503])
def test_busy_engine_has_its_retry_delay(status: int) -> None:
    server = Misbehaving(refuse(status, {"error": "busy"}))
    with pytest.raises(EngineBusy, match=rf"http://127.0.0.1:\d+/v1 answered {status}.*busy") as busy:
        ask(server)
    assert busy.value.retry_after_s == 7.0
    assert len(server.bodies) == 1, "the pool decides about waiting"


def test_broken_engine_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"http://127.0.0.1:\d+/v1 answered 500.*out of memory.*look at its log"):
        ask(Misbehaving(refuse(500, {"error": {"message": "out of memory"}})))


def test_unreachable_engine_is_an_engine_error() -> None:
    with serving(Misbehaving(accept()).app()) as url:
        pass
    with pytest.raises(EngineError, match=r"cannot be reached.*is it running"):
        using(url, lambda engine: engine.chat(ChatRequest(PROMPT, 10, SamplingParams())), model="m")


def test_engine_without_a_model_list_is_refused() -> None:
    with (
        serving(Misbehaving(accept()).app()) as url,
        pytest.raises(EngineRefused, match=r"answered 404.*check the address"),
    ):
        using(url, lambda engine: engine.chat(ChatRequest(PROMPT, 10, SamplingParams())))


def test_wrong_key_is_reported() -> None:
    with pytest.raises(EngineRefused, match="check the engine's API key"):
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


def test_key_that_a_server_repeats_is_not_shown() -> None:
    server = Misbehaving(refuse(401, {"error": {"message": "no such key: sk-12345"}}))
    with serving(server.app()) as url, pytest.raises(EngineRefused, match=r"no such key: \*\*\*") as caught:
        using(url, lambda engine: engine.chat(ChatRequest(PROMPT, 9, SamplingParams())), model="m", key="sk-12345")
    assert "sk-12345" not in str(caught.value)


def test_refused_sampling_field_is_never_dropped() -> None:
    refusal = refuse(422, {"error": {"message": "Unexpected fields in the request: {'top_k'}"}})
    with pytest.raises(EngineRefused, match="check the sampling parameters"):
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
def test_full_context_is_a_limit(error: dict[str, Any]) -> None:
    with pytest.raises(LimitReached) as limit:
        ask(Misbehaving(refuse(400, {"error": error})))
    assert limit.value.outcome is Outcome.CONTEXT_FULL


def test_too_large_max_tokens_are_reduced_to_fit() -> None:
    message = (
        "This model's maximum context length is 60 tokens. However, you requested 112 tokens (12 in the messages, "
    )
    server = Misbehaving(refuse(400, {"error": {"message": message + "100 in the completion)."}}), accept())
    assert ask(server).response["content"] == "hi"
    assert [body["max_tokens"] for body in server.bodies] == [100, 48]


@pytest.mark.parametrize("body", ["<html>busy</html>", '{"choices": []}', "[]", "null"])
def test_answer_without_a_completion_is_an_engine_error(body: str) -> None:
    with pytest.raises(EngineError, match=r"gave an (unreadable )?answer"):
        ask(Misbehaving(lambda _: PlainTextResponse(body, media_type="application/json")))


def test_half_a_surrogate_pair_is_not_a_broken_answer() -> None:
    answer = json.dumps({"choices": [{"message": {"content": "half \ud83d"}, "finish_reason": "stop"}]})
    completion = ask(Misbehaving(lambda _: Response(answer, media_type="application/json")))
    assert completion.response["content"] == "half \ud83d"


def test_address_may_have_another_ending() -> None:
    misbehaving = Misbehaving(accept())

    async def use(url: str) -> None:
        engine = open_engine(EngineAddress(f"{url}/openai", "m"), EngineInfo(), timeout_s=20)
        try:
            await engine.chat(ChatRequest(PROMPT, 100, SamplingParams()))
        finally:
            await engine.aclose()

    with serving(Starlette(routes=[Mount("/openai", misbehaving.app("/chat/completions"))])) as url:
        asyncio.run(use(url))
    assert len(misbehaving.bodies) == 1


def test_aborted_generation_is_busy() -> None:
    with pytest.raises(EngineBusy, match="is it paused for new weights"):
        ask(Misbehaving(accept(finish_reason="abort")))
    with pytest.raises(EngineError, match="broke off the generation"):
        ask(Misbehaving(accept(finish_reason="error")))


def test_malformed_arguments_are_wrapped_for_servers_that_parse_them() -> None:
    def reply(body: dict[str, Any]) -> Response:
        try:
            json.loads(body["messages"][1]["tool_calls"][0]["function"]["arguments"])
        except ValueError as error:
            return refuse(400, {"error": {"message": str(error)}})(body)
        return accept()(body)

    async def use(engine: Engine) -> Completion:
        history = [*PROMPT, calling(("python", "{not json")).response]
        return await engine.chat(ChatRequest(history, 10, SamplingParams()))

    server = Misbehaving(reply)
    with serving(server.app()) as url:
        assert using(url, use, model="m").response["content"] == "hi"
    assert len(server.bodies) == 2


def test_concurrent_calls_to_a_plain_server_all_succeed() -> None:
    refusal = {"error": {"message": "Unexpected fields in the request: {'return_token_ids'}"}}

    async def use(engine: Engine) -> list[Completion]:
        return await asyncio.gather(*[engine.chat(ChatRequest(PROMPT, 10, SamplingParams())) for _ in range(5)])

    server = Misbehaving(lambda body: refuse(422, refusal)(body) if "return_token_ids" in body else accept()(body))
    with serving(server.app()) as url:
        assert len(using(url, use, model="m")) == 5


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_earlier_reasoning_is_sent_under_both_of_its_names(name: str) -> None:
    server = Misbehaving(accept())
    turn = {"role": "assistant", "content": "4", name: "Let me add."}

    async def use(engine: Engine) -> Completion:
        return await engine.chat(ChatRequest([*PROMPT, turn, *PROMPT], 100, SamplingParams(), model="m"))

    with serving(server.app()) as url:
        using(url, use)
    [body] = server.bodies
    assert body["messages"] == [
        PROMPT[0],
        {"role": "assistant", "content": "4", "reasoning": "Let me add.", "reasoning_content": "Let me add."},
        PROMPT[0],
    ]


RED = PicturePart(Picture.of(png()))  # type: ignore[arg-type]
SHOWN: list[Message] = [{"role": "user", "content": [{"type": "text", "text": "look"}, RED]}]


def ask_of_image(misbehaving: Misbehaving) -> Completion:
    with serving(misbehaving.app()) as url:
        request = ChatRequest(SHOWN, 100, SamplingParams(), model="m")
        return cast(Completion, using(url, lambda engine: engine.chat(request)))


@pytest.mark.parametrize(
    "detail",
    [
        "tiny is not a multimodal model",
        "At most 0 image(s) may be provided in one prompt.",
        "This model does not support image input",
        "image input is not supported - hint: you may need to provide the mmproj",
    ],
)
def test_engine_without_images_is_named_with_its_model_and_the_remedy(detail: str) -> None:
    misbehaving = Misbehaving(refuse(400, {"error": {"message": detail}}))
    with pytest.raises(ImagesRefused) as caught:
        ask_of_image(misbehaving)
    for words in (detail, "its model 'm'", "set agent_requests.images to `text`"):
        assert words in str(caught.value)
    # the request is not retried in another form, in particular not without the image
    (body,) = misbehaving.bodies
    assert body["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": url_of(png())}}


def test_every_form_of_a_refused_request_has_its_images() -> None:
    refused = refuse(400, {"error": {"message": "unexpected field return_token_ids"}})
    misbehaving = Misbehaving(refused, accept())
    ask_of_image(misbehaving)
    assert [body["messages"][0]["content"][1]["type"] for body in misbehaving.bodies] == ["image_url"] * 2


def test_image_words_in_an_error_are_ignored_without_images() -> None:
    misbehaving = Misbehaving(refuse(400, {"error": {"message": "tiny is not a multimodal model"}}))
    with pytest.raises(EngineRefused) as caught:
        ask(misbehaving)
    assert not isinstance(caught.value, ImagesRefused)


def test_max_tokens_are_limited_to_the_free_context() -> None:
    misbehaving = Misbehaving(accept())

    async def run(url: str) -> None:
        engine = open_engine(EngineAddress(f"{url}/v1"), EngineInfo(context_tokens=64), timeout_s=20)
        try:
            await engine.chat(ChatRequest(PROMPT, 100, SamplingParams(), model="m"))
        finally:
            await engine.aclose()

    with serving(misbehaving.app()) as url:
        asyncio.run(run(url))
    assert misbehaving.bodies[0]["max_tokens"] == 64
