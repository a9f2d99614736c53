"""Log-probabilities in the form of each API: the recorded ones, of every sampled token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from tests.unit.workers.policy.gateway.serving import Playing, Served, served
from workers.policy.engines import detect
from workers.policy.generation import EngineAddress
from workers.policy.policy import RolloutPolicy
from workers.policy.routing.backend import record_of
from workers.policy.routing.pool import EnginePool
from workers.policy.routing.router import RoutingKey, StickyRouter
from workers.testing import ScriptedModel
from workers.testing.engine import ScriptedEngine
from workers.testing.serving import serving

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
Given = list[tuple[str, float]]


@asynccontextmanager
async def on_an_engine() -> AsyncIterator[Served]:
    with serving(ScriptedEngine(mean_tokens=12).app()) as url:
        address = EngineAddress(f"{url}/v1")
        engine = record_of(address, await detect(address))
        pool = EnginePool(lambda: (engine,))
        try:
            policy = RolloutPolicy(StickyRouter(pool, RoutingKey("r1")), "r1")
            async with served(policy) as gateway:
                yield gateway
        finally:
            await pool.aclose()


def of_chat(logprobs: Any) -> Given:
    return [(bytes(each.bytes).decode(), each.logprob) for each in logprobs.content]


async def chat(gateway: Served) -> Given:
    answer = await gateway.openai.chat.completions.create(model="m", messages=HELLO, logprobs=True, top_logprobs=0)
    return of_chat(answer.choices[0].logprobs)


async def chat_stream(gateway: Served) -> Given:
    async with gateway.openai.chat.completions.stream(model="m", messages=HELLO, logprobs=True) as stream:
        async for _ in stream:
            pass
        return of_chat((await stream.get_final_completion()).choices[0].logprobs)


def of_response(response: Any) -> Given:
    texts = [item.content[0] for item in response.output if item.type == "message"]
    return [(each.token, each.logprob) for each in texts[-1].logprobs]


INCLUDED: Any = ["message.output_text.logprobs"]


async def responses(gateway: Served) -> Given:
    return of_response(await gateway.openai.responses.create(model="m", input="hello", include=INCLUDED))


async def responses_stream(gateway: Served) -> Given:
    async with gateway.openai.responses.stream(model="m", input="hello", include=INCLUDED) as stream:
        return of_response(await stream.get_final_response())


async def google(gateway: Served) -> Given:
    from google.genai.types import GenerateContentConfig

    config = GenerateContentConfig(response_logprobs=True)
    answer: Any = await gateway.google.models.generate_content(model="m", contents="hello", config=config)
    chosen = answer.candidates[0].logprobs_result.chosen_candidates
    ids = gateway.records.calls[0].response_ids
    assert ids is not None
    assert [each.token_id for each in chosen] == list(ids)
    return [(each.token, each.log_probability) for each in chosen]


@pytest.mark.parametrize("client", [chat, chat_stream, responses, responses_stream, google])
def test_log_probabilities_are_the_recorded_ones(client: Callable[[Served], Awaitable[Given]]) -> None:
    async def main() -> None:
        async with on_an_engine() as gateway:
            given = await client(gateway)
            (call,) = gateway.records.calls
        assert call.response_logprobs is not None
        assert np.allclose([logprob for _, logprob in given], call.response_logprobs)
        content = str(call.response["content"])
        assert content
        assert content in "".join(text for text, _ in given)

    asyncio.run(main())


def test_log_probabilities_of_other_tokens_are_refused_by_name() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ("/v1/responses", {"input": "hello", "top_logprobs": 1}, "top_logprobs"),
        ("/v1beta/models/m:generateContent", {"contents": "x", "generationConfig": {"logprobs": 2}}, "logprobs"),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": "yes"}, "logprobs"),
    ]

    async def main() -> None:
        async with served(Playing()) as gateway:
            for path, body, name in cases:
                response = await gateway.post(path, body)
                assert response.status_code == 400, (name, response.text)
                assert f"{name}: " in response.json()["error"]["message"]

    asyncio.run(main())


def test_role_model_has_no_log_probabilities() -> None:
    async def main() -> None:
        async with served(Playing(), models={"helper": ScriptedModel("yes")}) as gateway:
            response = await gateway.post(
                "/v1/chat/completions", {"model": "helper", "messages": HELLO, "logprobs": True}
            )
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "logprobs"

    asyncio.run(main())
