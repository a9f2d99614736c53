"""Requests that are sent again because their reply was lost: one turn is sampled, counted and recorded once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from farm.errors import EngineError
from tests.unit.workers.policy.gateway.serving import Playing, Served, served
from workers.policy.gateway.conversations import is_retry
from workers.testing import ScriptedModel, answering

HELLO: Any = {"role": "user", "content": "hello"}
CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [HELLO]}
AGAIN = {"x-stainless-retry-count": "1"}


async def chat(gateway: Served) -> str:
    answer = await gateway.openai.chat.completions.create(model="m", messages=[HELLO])
    return str(answer.choices[0].message.content)


async def responses(gateway: Served) -> str:
    return (await gateway.openai.responses.create(model="m", input="hello")).output_text


async def messages(gateway: Served) -> str:
    answer = await gateway.anthropic.messages.create(model="m", messages=[HELLO], max_tokens=9)
    return str(getattr(answer.content[0], "text", ""))


async def streamed_chat(gateway: Served) -> str:
    stream = await gateway.openai.chat.completions.create(model="m", messages=[HELLO], stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def streamed_messages(gateway: Served) -> str:
    async with gateway.anthropic.messages.stream(model="m", messages=[HELLO], max_tokens=9) as stream:
        return await stream.get_final_text()


async def helper(gateway: Served) -> str:
    answer = await gateway.openai.chat.completions.create(model="helper", messages=[HELLO])
    return str(answer.choices[0].message.content)


def losing(n_lost: int) -> Callable[[httpx2.Response], Awaitable[None]]:
    """A hook that loses the first replies after they have arrived completely."""
    left = iter(range(n_lost))

    async def lose(response: httpx2.Response) -> None:
        await response.aread()
        if next(left, None) is not None:
            raise httpx2.ReadError("the connection is lost")

    return lose


@pytest.mark.parametrize("n_lost", [1, 2])
@pytest.mark.parametrize("ask", [chat, responses, messages, streamed_chat, streamed_messages, helper])
def test_official_client_gets_the_lost_answer(ask: Callable[[Served], Awaitable[str]], n_lost: int) -> None:
    async def main() -> None:
        policy, model = Playing(answering("once"), answering("more")), ScriptedModel("once", "more")
        async with served(policy, max_retries=2, models={"helper": model}, max_turns=2) as gateway:
            gateway.http.event_hooks["response"] = [losing(n_lost)]
            assert await ask(gateway) == "once"
            assert len(gateway.records.calls) == 1
            # a new request is a new turn, even with the same words, and the lost attempts are no turns
            assert await ask(gateway) == "more"
            assert len(gateway.records.calls) == 2

    asyncio.run(main())


def test_last_turn_of_a_rollout_is_returned_again() -> None:
    async def main() -> None:
        async with served(Playing(answering("once")), max_turns=1) as gateway:
            assert (await gateway.post(CHAT, BODY)).status_code == 200
            again = await gateway.http.post(gateway.url + CHAT, json=BODY, headers=AGAIN)
            assert "once" in again.text
            assert gateway.calls.limit is None

    asyncio.run(main())


def test_retry_waits_for_a_running_first_attempt() -> None:
    async def main() -> None:
        policy = Playing(answering("once"), answering("more"))
        policy.gate = asyncio.Event()
        async with served(policy) as gateway:
            first = asyncio.create_task(gateway.post(CHAT, BODY))
            await policy.begun.wait()
            again = asyncio.create_task(gateway.http.post(gateway.url + CHAT, json=BODY, headers=AGAIN))
            await asyncio.sleep(0.05)
            assert policy.n_at_once == 1
            policy.gate.set()
            assert [("once" in each.text) for each in await asyncio.gather(first, again)] == [True, True]
            assert len(policy.asked) == len(gateway.records.calls) == 1

    asyncio.run(main())


def test_retry_whose_first_attempt_was_cancelled_is_sampled() -> None:
    async def main() -> None:
        policy = Playing(answering("more"))
        policy.gate = asyncio.Event()
        async with served(policy) as gateway:
            async with httpx2.AsyncClient(trust_env=False) as leaving:
                first = asyncio.create_task(leaving.post(gateway.url + CHAT, json=BODY))
                await policy.begun.wait()
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            again = asyncio.create_task(gateway.http.post(gateway.url + CHAT, json=BODY, headers=AGAIN))
            await policy.cancelled.wait()
            policy.gate.set()
            assert "more" in (await again).text
            assert len(gateway.records.calls) == 1

    asyncio.run(main())


def test_retry_after_an_error_does_not_get_the_answer_of_an_equal_request() -> None:
    async def main() -> None:
        policy = Playing(answering("one sample"), EngineError("it is down"), answering("another sample"))
        async with served(policy) as gateway:
            assert "one sample" in (await gateway.post(CHAT, BODY)).text
            assert (await gateway.post(CHAT, BODY)).status_code == 503
            again = await gateway.http.post(gateway.url + CHAT, json=BODY, headers=AGAIN)
            assert "another sample" in again.text
            assert len(gateway.records.calls) == 2

    asyncio.run(main())


def test_retry_of_another_request_is_sampled() -> None:
    async def main() -> None:
        async with served(Playing(answering("one"), answering("two"))) as gateway:
            await gateway.post(CHAT, BODY)
            other = {**BODY, "max_tokens": 7}
            again = await gateway.http.post(gateway.url + CHAT, json=other, headers=AGAIN)
            assert "two" in again.text

    asyncio.run(main())


def test_number_of_kept_answers_is_limited() -> None:
    async def main() -> None:
        async with served(Playing(answer=lambda asked: answering(str(len(asked)))), max_turns=99) as gateway:
            bodies = [{**BODY, "messages": [HELLO] * n} for n in range(1, 13)]
            for body in bodies:
                await gateway.post(CHAT, body)
            kept = gateway.calls._recent._read
            assert len(kept) == 8
            assert all(each.prompt_ids is None for each in kept.values())

    asyncio.run(main())


@pytest.mark.parametrize(("value", "wanted"), [("0", False), ("1", True), ("12", True), ("", False), ("-1", False)])
def test_retry_count_header_marks_a_retry(value: str, wanted: bool) -> None:
    assert is_retry({"x-stainless-retry-count": value}) is wanted
    assert not is_retry({})
