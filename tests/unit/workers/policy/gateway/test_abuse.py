"""Malicious or excessive clients: the policy's own programs reach the gateway as well as the agent."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from farm.errors import EngineError, LimitReached
from farm.records.rollout import Outcome
from tests.unit.workers.policy.gateway.serving import Playing, Records, context_of, saying, served
from workers.plugins.interfaces import Delta
from workers.policy.gateway.app import MAX_CONNECTIONS, SOCKET, gateway
from workers.policy.gateway.calls import GatewayCalls
from workers.policy.gateway.dialects.chat_completions import ChatApi
from workers.policy.gateway.dialects.model_api import Api, BadRequest
from workers.policy.gateway.dialects.responses import ResponsesApi
from workers.policy.gateway.gateway_http import MAX_BODY_BYTES
from workers.testing import answering, calling

PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]
CHAT: Api = ChatApi()
HELLO = {"messages": [{"role": "user", "content": "hello"}], "input": "hello", "max_tokens": 50, "model": "m"}

each_api = pytest.mark.parametrize("path", PATHS)


def nested(depth: int) -> list[Any]:
    result: list[Any] = []
    for _ in range(depth):
        result = [result]
    return result


@each_api
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("depth", [200, 249, 300, 5000])
def test_deeply_nested_arguments_are_accepted_in_an_answer(path: str, stream: bool, depth: int) -> None:
    async def main() -> None:
        deep = calling(("look", {"at": 1}))
        deep.response["tool_calls"][0]["function"]["arguments"] = f'{{"at": {"[" * depth}{"]" * depth}}}'
        async with served(Playing(deep)) as gateway:
            response = await gateway.post(path, {**HELLO, "stream": stream})
            assert response.status_code == 200
            assert "[" * depth in response.text
            assert [call.response for call in gateway.records.calls] == [deep.response]
            assert gateway.calls.failure is None

    asyncio.run(main())


@each_api
@pytest.mark.parametrize("field", ["tools", "metadata", "response_format"])
def test_deeply_nested_request_is_refused(path: str, field: str) -> None:
    async def main() -> None:
        async with served(Playing()) as gateway:
            response = await gateway.http.post(gateway.url + path, content=json.dumps({**HELLO, field: nested(300)}))
            assert response.status_code == 400
            assert "nested too deep" in response.json()["error"]["message"]

    asyncio.run(main())


async def read_and_leave(url: str, body: dict[str, Any], policy: Playing) -> None:
    """Hang up once the first part of the answer has arrived."""
    policy.cancelled.clear()
    async with httpx2.AsyncClient(trust_env=False) as leaving, leaving.stream("POST", url, json=body) as response:
        async for piece in response.aiter_text():
            if policy.first[0].text in piece:
                break
    async with asyncio.timeout(120):
        await policy.cancelled.wait()


@each_api
@pytest.mark.parametrize(
    ("limits", "outcome"), [({"max_turns": 2}, Outcome.MAX_TURNS), ({"max_tokens": 100}, Outcome.MAX_TOKENS)]
)
def test_partially_read_answer_counts(path: str, limits: dict[str, Any], outcome: Outcome) -> None:
    async def main() -> None:
        policy = Playing(saying())
        policy.gate, policy.first = asyncio.Event(), [Delta("x" * 200)]
        async with served(policy, **limits) as gateway:
            for _ in range(2):
                await read_and_leave(gateway.url + path, {**HELLO, "stream": True}, policy)
            policy.gate.set()
            assert (await gateway.post(path, HELLO)).status_code == 403
            assert gateway.calls.limit is not None
            assert gateway.calls.limit.outcome is outcome

    asyncio.run(main())


def test_number_of_connections_is_limited(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway(GatewayCalls(context_of(Playing(), Records())), tmp_path) as address:
            opened = [await asyncio.open_unix_connection(str(tmp_path / SOCKET)) for _ in range(MAX_CONNECTIONS + 20)]
            async with asyncio.timeout(120):
                ends = [asyncio.ensure_future(reader.read()) for reader, _ in opened]
                while sum(end.done() for end in ends) < 20:
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=0.1)
            assert not any(end.done() for end in ends[:MAX_CONNECTIONS])
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            reader, writer = opened[0]
            writer.write(f"GET /t/{address.key}/v1/models HTTP/1.1\r\nhost: farm\r\n\r\n".encode())
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            for _, each in opened:
                each.close()

    asyncio.run(main())


def test_total_size_of_bodies_is_limited() -> None:
    async def main() -> None:
        policy = Playing(answer=lambda _: saying())
        policy.gate = asyncio.Event()
        big = {"model": "m", "messages": [{"role": "user", "content": "x" * (MAX_BODY_BYTES - 1000)}]}
        async with served(policy) as gateway:
            result = [asyncio.create_task(gateway.post(PATHS[0], big)) for _ in range(4)]
            done, waiting = await asyncio.wait(result, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            while len(done) < 2:
                done, waiting = await asyncio.wait(result, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            assert {(await each).status_code for each in done} == {503}
            policy.gate.set()
            assert {(await each).status_code for each in waiting} == {200}
            assert (await gateway.post(PATHS[0], big)).status_code == 200
            assert gateway.calls.failure is None

    asyncio.run(main())


def test_garbage_does_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with gateway(GatewayCalls(context_of(Playing(), Records())), tmp_path):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / SOCKET))
            writer.write(b"\x00\xff rubbish\r\n\r\n")
            assert b"400" in await reader.readline()
            writer.close()

    asyncio.run(main())
    assert caplog.records == []


def test_many_conversations_without_an_answer_end_the_rollout() -> None:
    async def main() -> None:
        refused = EngineError("the template does not take it")
        async with served(Playing(answer=lambda _: refused)) as gateway:
            for number in range(40):
                said = {"role": "user", "content": str(number)}
                assert (await gateway.post(PATHS[0], {**HELLO, "messages": [said]})).status_code == 503
            assert gateway.calls.over.is_set()
            assert gateway.calls.failure is refused

    asyncio.run(main())


def test_kept_errors_hold_no_requests() -> None:
    async def main() -> None:
        def refuse(messages: Any) -> EngineError:
            error = EngineError("gone")
            error.__cause__ = OSError("reset")
            return error

        async with served(Playing(answer=refuse)) as gateway:
            for stream in (False, True):
                assert (await gateway.post(PATHS[0], {**HELLO, "stream": stream})).status_code == 503
            failure = gateway.calls.failure
            assert failure is not None
            assert failure.__traceback__ is None
            assert failure.__cause__ is not None

    asyncio.run(main())


def test_large_body_is_read_like_a_small_one() -> None:
    async def main() -> None:
        policy = Playing(answer=lambda _: saying())
        async with served(policy) as gateway:
            texts = [f"{n} {'x' * 40}" for n in range(5000)]
            many = [{"role": "user", "content": [{"type": "text", "text": text}]} for text in texts]
            for body in ({**HELLO, "messages": many}, {**HELLO, "messages": many, "stream": True}):
                assert (await gateway.post(PATHS[0], body)).status_code == 200
            response = await gateway.post(PATHS[0], {**HELLO, "messages": [*many, {"role": "nobody"}]})
            assert response.status_code == 400
            assert "messages[5000].role: " in response.json()["error"]["message"]
            deep = json.dumps({**HELLO, "messages": many, "metadata": nested(300)})
            assert (await gateway.http.post(gateway.url + PATHS[0], content=deep)).status_code == 400
        assert [message["content"] for message in policy.asked[0][0]] == texts

    asyncio.run(main())


def test_repeatedly_raised_limit_does_not_grow() -> None:
    async def main() -> None:
        calls = GatewayCalls(context_of(Playing(saying()), Records(), max_turns=1))
        parsed_request = CHAT.parse(HELLO)
        await calls.complete(parsed_request)
        depths = []
        for _ in range(5):
            with pytest.raises(LimitReached) as raised:
                await calls.complete(parsed_request)
            depths.append(len(raised.traceback))
        assert depths[1:] == depths[:1] * 4

    asyncio.run(main())


def test_conversation_is_stored_once_and_only_if_requested() -> None:
    api: Api = ResponsesApi()
    said = [{"role": "user", "content": "hello"}]
    ids = []
    for _ in range(2):
        said = [*said, {"role": "user", "content": "more"}]
        ids.append(api.answer(api.parse({"input": said}), answering("yes"))["id"])
    more = {"input": "on"}
    first, second = (api.parse({"previous_response_id": each, **more}).messages for each in ids)
    assert [message["content"] for message in second] == ["hello", "more", "more", "yes", "on"]
    assert first[0] is second[0]
    unkept = api.answer(api.parse({"input": said, "store": False}), answering("yes"))
    assert unkept["store"] is False
    with pytest.raises(BadRequest, match="there is no response"):
        api.parse({"previous_response_id": unkept["id"], **more})


@pytest.mark.parametrize("stop", [["x"] * 65, ["x" * 1001]])
def test_number_of_stop_texts_is_limited(stop: list[str]) -> None:
    with pytest.raises(BadRequest, match="stop: at most 64 texts of 1000 characters"):
        CHAT.parse({**HELLO, "stop": stop})


def test_recorded_parameters_of_a_request_are_short() -> None:
    there = {"type": "function", "function": {"name": "look"}}
    tools = [there, *({"type": "x" * 5000} for _ in range(500))]
    parsed_request = CHAT.parse({**HELLO, "tools": tools, "logit_bias": {str(number): 1 for number in range(10_000)}})
    assert len(json.dumps(parsed_request.requested_params)) < 100_000
    assert "logit_bias" not in parsed_request.requested_params


def test_request_with_millions_of_objects_is_refused() -> None:
    async def main() -> None:
        async with served(Playing()) as gateway:
            for each in (b"[],", b"{},"):
                body = b'{"messages": [' + each * 2_000_000 + b"0]}"
                assert (await gateway.http.post(gateway.url + PATHS[0], content=body)).status_code == 413

    asyncio.run(main())
