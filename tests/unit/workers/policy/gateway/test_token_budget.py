"""The tokens that a program may use, as in its API's list of models, and role calls that count against them."""

from __future__ import annotations

import asyncio
from typing import Any

from farm.errors import EngineError
from farm.records.request import SamplingParams
from tests.unit.workers.policy.gateway.serving import Playing, saying, served
from workers.testing import ScriptedModel, answering

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
OUTPUT = ("max_output_tokens", "max_tokens", "outputTokenLimit")
CONTEXT = ("context_length", "context_window", "max_model_len", "max_input_tokens", "inputTokenLimit")


class WithContext(Playing):
    """A policy that knows its engines' context."""

    context_tokens = 900


def test_models_list_the_remaining_tokens() -> None:
    async def main() -> None:
        policy = WithContext(saying(), saying())
        async with served(policy, models={"helper": ScriptedModel("x")}, max_tokens=1000) as gateway:
            listed = (await gateway.http.get(f"{gateway.url}/v1/models")).json()["data"]
            assert [{entry[name] for name in (*OUTPUT, *CONTEXT)} for entry in listed[:1]] == [{900}]
            assert not {*OUTPUT, *CONTEXT} & listed[1].keys()
            for left in (990, 980):
                await gateway.post(CHAT, HELLO | {"max_tokens": left})
            for path in ("/v1/models/policy", "/v1beta/models/policy"):
                assert (await gateway.http.get(gateway.url + path)).json()["outputTokenLimit"] == 900

    asyncio.run(main())


def test_unknown_context_is_not_listed_and_an_answer_uses_all_that_is_allowed() -> None:
    async def main() -> None:
        sampling = SamplingParams(max_tokens=64)
        async with served(Playing(*(saying() for _ in range(5))), sampling=sampling, max_tokens=100) as gateway:
            seen = []
            for _ in range(5):
                entry = (await gateway.http.get(f"{gateway.url}/v1/models/any")).json()
                assert not {*CONTEXT} & entry.keys()
                seen.append(entry["max_output_tokens"])
                await gateway.post(CHAT, HELLO)
            assert seen == [64, 64, 64, 64, 60]

    asyncio.run(main())


def test_calls_of_roles_count_against_the_limits() -> None:
    async def main() -> None:
        helper = ScriptedModel("a", EngineError("its server is gone"), "b", "c", "d")
        async with served(Playing(saying()), models={"helper": helper}, max_turns=3, max_tokens=1000) as gateway:
            ask = HELLO | {"model": "helper"}
            codes = [(await gateway.post(CHAT, ask)).status_code for _ in range(2)]
            codes.append((await gateway.post(CHAT, HELLO)).status_code)
            codes += [(await gateway.post(CHAT, ask)).status_code for _ in range(2)]
            assert codes == [200, 503, 200, 200, 403], "an unanswered call is no turn"
            assert gateway.calls.limit is not None
        assert [sampling.max_tokens for _, sampling in helper.requests] == [1000, 990, 980]

    asyncio.run(main())


def test_role_may_not_sample_more_than_the_remaining_tokens() -> None:
    async def main() -> None:
        helper = ScriptedModel("a")
        async with served(Playing(answering("x", n_tokens=95)), models={"helper": helper}, max_tokens=100) as gateway:
            assert (await gateway.post(CHAT, HELLO)).status_code == 200
            assert (await gateway.post(CHAT, HELLO | {"model": "helper", "max_tokens": 50})).status_code == 200
            assert (await gateway.post(CHAT, HELLO | {"model": "helper"})).status_code == 403
        assert helper.requests[0][1].max_tokens == 5

    asyncio.run(main())
