"""Images of agent programs, over real HTTP from the gateway to an engine: recorded with the ids that it saw."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from farm.errors import AgentError, EngineError
from farm.records.request import AgentRequests
from farm.records.trajectory import ModelCall, segments
from tests.doubles import EngineDouble
from tests.doubles.drawn_images import png, url_of
from tests.doubles.vllm.image_parts import PLACEHOLDER, n_places
from tests.integration.engines.test_rollout_policy import _Bench, run
from tests.unit.workers.policy.gateway.dialects import test_request_pictures as forms
from tests.unit.workers.policy.gateway.serving import Served, served
from workers.plugins.interfaces import Artefact
from workers.policy.generation import ImagesRefused

WIDE, SMALL, BLUE = png(140, 60), png(28, 28), png(28, 28, (0, 0, 255))
ENGINE = AgentRequests(images="engine")
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
GOOGLE = "/v1beta/models/policy:generateContent"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def run_with_gateway(
    test: Callable[[Served, _Bench], Coroutine[Any, Any, None]],
    *doubles: EngineDouble,
    requests: AgentRequests = ENGINE,
) -> None:
    async def main(bench: _Bench) -> None:
        async with served(bench.policy(), requests=requests) as gateway:
            await test(gateway, bench)

    run(main, *(doubles or (EngineDouble(images=True, mean_tokens=4),)))


def places(call: ModelCall, double: EngineDouble) -> int:
    assert call.prompt_ids is not None
    return int((call.prompt_ids == double.machine.vocabulary.id_of(PLACEHOLDER)).sum())


def user(*data: bytes, text: str = "look") -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}, *map(forms.in_chat, data)]}


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, lambda role: forms.chat(forms.TEXT, forms.in_chat(WIDE), role=role)),
        (
            RESPONSES,
            lambda role: forms.responses({"type": "input_text", "text": "look"}, forms.in_responses(WIDE), role=role),
        ),
        (MESSAGES, lambda role: forms.messages(forms.TEXT, forms.in_messages(WIDE), role=role)),
        (GOOGLE, lambda role: forms.contents({"text": "look"}, forms.in_contents(WIDE), role=role)),
    ],
    ids=["chat", "responses", "messages", "google"],
)
def test_each_api_records_the_token_ids_of_the_engine(path: str, body: Callable[[str], Any], role: str) -> None:
    double = EngineDouble(images=True, mean_tokens=4)

    async def test(gateway: Served, bench: _Bench) -> None:
        response = await gateway.post(path, {"model": "m", "max_tokens": 16, **body(role)})
        assert response.status_code == 200, response.text
        (call,) = gateway.records.calls
        assert places(call, double) == n_places(140, 60) == 15
        assert call.token_exact
        assert call.images == (digest(WIDE),)
        reference = {"type": "image", "sha256": digest(WIDE), "media_type": "image/png", "n_bytes": len(WIDE)}
        assert call.messages[-1]["content"] == [forms.TEXT, reference]
        assert gateway.records.kept == {f"{digest(WIDE)}.png": Artefact(f"{digest(WIDE)}.png", "image/png", WIDE)}

    run_with_gateway(test, double)


def test_conversation_with_images_is_one_row() -> None:
    double = EngineDouble(images=True, mean_tokens=4)

    async def test(gateway: Served, bench: _Bench) -> None:
        body: dict[str, Any] = {"model": "m", "max_tokens": 16, "messages": [user(WIDE)]}
        for data in (SMALL, WIDE):
            answer = (await gateway.post(CHAT, body)).json()["choices"][0]["message"]
            body["messages"] += [answer, user(data)]
        await gateway.post(CHAT, body)
        calls = gateway.records.calls
        assert [call.images for call in calls] == [
            (digest(WIDE),),
            (digest(WIDE), digest(SMALL)),
            (digest(WIDE), digest(SMALL), digest(WIDE)),
        ]
        assert [places(call, double) for call in calls] == [15, 16, 31]
        # text of random ids is seldom read back as the same ids, which begins a new row
        rows = segments(calls)
        assert rows[-1].images == calls[-1].images
        assert sum(int(row.response_mask.sum()) for row in rows) == sum(call.n_response_tokens for call in calls)
        assert sorted(gateway.records.kept) == sorted(f"{digest(data)}.png" for data in (WIDE, SMALL))
        # only new messages are recorded again
        assert [len(call.messages) for call in calls] == [1, 1, 1]

    run_with_gateway(test, double)


def test_calls_with_and_without_images_are_token_exact() -> None:
    double = EngineDouble(images=True, mean_tokens=4)

    async def test(gateway: Served, bench: _Bench) -> None:
        for message in (user(), user(SMALL), user(text="again")):
            body = {"model": "m", "max_tokens": 16, "messages": [message]}
            assert (await gateway.post(CHAT, body)).status_code == 200
        assert [call.images for call in gateway.records.calls] == [(), (digest(SMALL),), ()]
        assert all(call.token_exact for call in gateway.records.calls)

    run_with_gateway(test, double)


def test_images_of_equal_size_are_recorded_separately() -> None:
    async def test(gateway: Served, bench: _Bench) -> None:
        for data in (SMALL, BLUE):
            body = {"model": "m", "max_tokens": 16, "messages": [user(data)]}
            assert (await gateway.post(CHAT, body)).status_code == 200
        first, second = gateway.records.calls
        assert first.prompt_ids is not None
        assert second.prompt_ids is not None
        assert first.prompt_ids.tolist() == second.prompt_ids.tolist()
        assert [call.messages for call in (first, second)] != [first.messages] * 2
        assert [row.images for row in segments([first, second])] == [(digest(SMALL),), (digest(BLUE),)]

    run_with_gateway(test)


@pytest.mark.parametrize("wire", ["vllm", "openai"])
def test_image_for_a_text_model_ends_the_rollout_with_one_error(wire: Any) -> None:
    double = EngineDouble(wire=wire, mean_tokens=4)

    async def test(gateway: Served, bench: _Bench) -> None:
        body = {"model": "m", "max_tokens": 16, "messages": [user(SMALL)]}
        response = await gateway.post(CHAT, body)
        assert response.status_code == 400, response.text
        assert response.headers["x-should-retry"] == "false"
        failure = gateway.calls.failure
        assert isinstance(failure, ImagesRefused)
        assert not failure.retryable
        for words in (bench.urls[0], "is not a multimodal model", "its model", "agent_requests.images to `text`"):
            assert words in str(failure)
        # no engine is probed again, with an image or without
        assert gateway.calls.over.is_set()
        assert (await gateway.post(CHAT, {**body, "messages": [user()]})).status_code == 400
        assert not gateway.records.calls

    run_with_gateway(test, double)


def test_call_with_an_image_goes_to_an_engine_that_accepts_images() -> None:
    doubles = EngineDouble(mean_tokens=4), EngineDouble(images=True, mean_tokens=4)

    async def test(gateway: Served, bench: _Bench) -> None:
        for n in range(4):
            body = {"model": "m", "max_tokens": 16, "messages": [user(SMALL, text=f"look {n}")]}
            assert (await gateway.post(CHAT, body)).status_code == 200
        assert all(call.engine.startswith(bench.urls[1]) for call in gateway.records.calls)
        assert gateway.calls.failure is None

    run_with_gateway(test, *doubles)


def test_image_replaced_by_text_does_not_end_the_rollout() -> None:
    async def test(gateway: Served, bench: _Bench) -> None:
        body = {"model": "m", "max_tokens": 16, "messages": [user(SMALL)]}
        assert (await gateway.post(CHAT, body)).status_code == 200
        (call,) = gateway.records.calls
        assert call.images == ()
        assert call.messages[0]["content"] == "look\n[image left out]"
        assert not gateway.records.kept

    run_with_gateway(test, EngineDouble(mean_tokens=4), requests=AgentRequests(images="text"))


def test_unreadable_image_is_a_client_error() -> None:
    async def test(gateway: Served, bench: _Bench) -> None:
        broken = {"type": "image_url", "image_url": {"url": url_of(SMALL[:20])}}
        body: dict[str, Any] = {"model": "m", "max_tokens": 16, "messages": [{"role": "user", "content": [broken]}]}
        response = await gateway.post(CHAT, body)
        assert response.status_code == 400
        assert "an image of the conversation is unreadable: Failed to load image" in response.text
        assert gateway.calls.failure is None
        assert (await gateway.post(CHAT, {**body, "messages": [user(SMALL)]})).status_code == 200

    run_with_gateway(test)


def test_image_that_cannot_be_stored_is_sent_to_no_engine() -> None:
    async def test(gateway: Served, bench: _Bench) -> None:
        async def full(index: int, artefact: Artefact) -> str:
            return ""

        gateway.calls._context.keep = full
        body = {"model": "m", "max_tokens": 16, "messages": [user(SMALL)]}
        assert (await gateway.post(CHAT, body)).status_code == 400
        assert isinstance(gateway.calls.failure, AgentError)
        assert "raise FARM_ARTEFACTS_MB" in str(gateway.calls.failure)
        assert not gateway.records.calls

    run_with_gateway(test)


def test_image_in_a_prompt_of_token_ids_is_an_error() -> None:
    async def main(bench: _Bench) -> None:
        with pytest.raises(EngineError, match="a part of type 'image_url', which token ids cannot represent"):
            await bench.ask(bench.policy(), [user(SMALL)])

    run(main, EngineDouble(images=True, mean_tokens=4))
