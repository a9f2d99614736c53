"""Behaviour common to all APIs: the key, limits, failures, disconnects, concurrent calls, and recording."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from farm.errors import EngineError, LimitReached, RolloutError, StaleRollout
from farm.records.rollout import Outcome
from farm.records.trajectory import Message, ModelCall
from tests.unit.workers.policy.gateway.serving import Playing, Records, Served, context_of, saying, served
from workers.plugins.interfaces import Completion, Delta
from workers.policy.gateway.app import SOCKET, gateway
from workers.policy.gateway.calls import GatewayCalls
from workers.policy.gateway.dialects.chat_completions import ChatApi
from workers.policy.gateway.gateway_http import MAX_BODY_BYTES
from workers.testing import answering, calling

HELLO: Any = {"messages": [{"role": "user", "content": "hello"}], "input": "hello", "max_tokens": 50, "model": "m"}
PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]
BUSY = EngineError("engine http://10.0.0.7:8000 is gone")
FULL = LimitReached(Outcome.CONTEXT_FULL, "engine http://10.0.0.7:8000: 9000 tokens, context of 8192")

each_api = pytest.mark.parametrize("path", PATHS)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def asking(*messages: Message, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **more}


@pytest.mark.parametrize("key", ["", "x", "{key}x", "{half}"])
def test_wrong_key_gets_no_information(key: str) -> None:
    async def main() -> None:
        async with served(Playing()) as gateway:
            right = gateway.address.key
            tried = key.format(key=right, half=right[: len(right) // 2])
            for path in (*PATHS, "/v1/models", "/nothing", ""):
                for method in ("GET", "POST"):
                    response = await gateway.http.request(method, gateway.url.removesuffix(right) + tried + path)
                    assert response.status_code == 401
                    assert response.json()["error"]["message"] == "the key is wrong"

    asyncio.run(main())


def test_keys_differ_and_are_long() -> None:
    async def main() -> None:
        async with served(Playing()) as one, served(Playing()) as two:
            assert one.address.key != two.address.key
            assert len(one.address.key) >= 32

    asyncio.run(main())


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/chat/completions"), ("POST", "/v1/nothing"), ("GET", "/")])
def test_unknown_paths_are_not_found(method: str, path: str) -> None:
    async def main() -> None:
        async with served(Playing()) as gateway:
            assert (await gateway.http.request(method, gateway.url + path)).status_code == 404

    asyncio.run(main())


@each_api
def test_garbage_is_refused(path: str) -> None:
    async def main() -> None:
        async with served(Playing()) as gateway:
            for data in (b"", b"{", b"[]", b"3", b'{"messages": "\xff"}', b'{"a":' * 5000):
                response = await gateway.http.post(gateway.url + path, content=data)
                assert response.status_code == 400
                assert "JSON" in response.json()["error"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_body_is_refused(chunked: bool) -> None:
    async def pieces() -> Any:
        for _ in range(17):
            yield b"x" * 1_000_000

    async def main() -> None:
        async with served(Playing()) as gateway:
            content: Any = pieces() if chunked else b"x" * (MAX_BODY_BYTES + 1)
            response = await gateway.http.post(gateway.url + PATHS[0], content=content)
            assert response.status_code == 413
            again = await gateway.http.get(f"{gateway.url}/v1/models")
            assert again.status_code == 200

    asyncio.run(main())


def test_large_body_is_accepted() -> None:
    async def main() -> None:
        policy = Playing(saying())
        async with served(policy) as gateway:
            response = await gateway.post(PATHS[0], asking(user("x" * 15_000_000)))
            assert response.status_code == 200
            assert len(policy.asked[0][0][0]["content"]) == 15_000_000

    asyncio.run(main())


@each_api
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_disconnects_cancels_its_call(path: str, stream: bool) -> None:
    async def main() -> None:
        policy = Playing(saying())
        policy.gate = asyncio.Event()
        async with served(policy, max_turns=1) as gateway:
            async with httpx2.AsyncClient(trust_env=False) as leaving:
                request = leaving.stream("POST", gateway.url + path, json={**HELLO, "stream": stream})
                asking = asyncio.create_task(request.__aenter__())
                await policy.begun.wait()
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            async with asyncio.timeout(120):
                await policy.cancelled.wait()
            assert gateway.records.calls == []
            assert gateway.calls.failure is None
            policy.gate.set()
            response = await gateway.post(path, HELLO)
            assert response.status_code == 200, "a cancelled call is no turn"

    asyncio.run(main())


def test_client_that_disconnects_during_its_request_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        policy = Playing(saying())
        async with served(policy) as gateway:
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.address.port)
            path = f"/t/{gateway.address.key}{PATHS[0]}"
            writer.write(f"POST {path} HTTP/1.1\r\nhost: farm\r\ncontent-length: 1000\r\n\r\n{{".encode())
            await writer.drain()
            writer.close()
            assert (await gateway.post(PATHS[0], HELLO)).status_code == 200
        assert len(policy.asked) == 1
        assert caplog.records == []

    asyncio.run(main())


@each_api
def test_full_context_is_returned_and_remembered(path: str) -> None:
    async def main() -> None:
        async with served(Playing(FULL, saying(), FULL)) as gateway:
            response = await gateway.post(path, HELLO)
            assert response.status_code == 400
            assert response.headers["x-should-retry"] == "false"
            error = response.json()["error"]
            assert "maximum context length" in error["message"]
            assert "10.0.0.7" not in response.text
            if path == "/v1/messages":
                assert error["message"].startswith("prompt is too long")
            else:
                assert error["code"] == "context_length_exceeded"
            assert gateway.calls.limit is FULL
            assert not gateway.calls.over.is_set()
            assert (await gateway.post(path, HELLO)).status_code == 200
            assert gateway.calls.limit is None, "the agent continued with a shorter one"
            await gateway.post(path, HELLO)
            assert gateway.calls.limit is FULL

    asyncio.run(main())


@each_api
@pytest.mark.parametrize("stream", [False, True])
def test_engine_failure_is_returned_and_remembered(path: str, stream: bool) -> None:
    async def main() -> None:
        async with served(Playing(BUSY, saying()), max_turns=1) as gateway:
            response = await gateway.post(path, {**HELLO, "stream": stream})
            assert response.status_code == 503
            assert (response.headers["retry-after"], response.headers["x-should-retry"]) == ("1", "true")
            assert "10.0.0.7" not in response.text
            assert gateway.calls.failure is BUSY
            assert gateway.calls.n_answered == 0
            again = await gateway.post(path, {**HELLO, "stream": stream})
            assert again.status_code == 200, "a failed call is no turn"
            assert gateway.calls.failure is None, "the same request was answered later"

    asyncio.run(main())


def test_retry_of_the_official_client_gets_the_answer() -> None:
    async def main() -> None:
        async with served(Playing(BUSY, saying("hi")), max_retries=1) as gateway:
            answer = await gateway.openai.chat.completions.create(model="m", messages=[user("hello")])  # type: ignore[list-item]
            assert answer.choices[0].message.content == "hi"
            assert gateway.calls.failure is None

    asyncio.run(main())


def test_failure_is_not_cleared_by_other_answers() -> None:
    async def main() -> None:
        async with served(Playing(BUSY, saying())) as gateway:
            await gateway.post(PATHS[0], asking(user("one")))
            await gateway.post(PATHS[0], asking(user("another")))
            assert gateway.calls.failure is BUSY

    asyncio.run(main())


class _Refused(RolloutError):
    retryable = False


@pytest.mark.parametrize(("error", "status"), [(_Refused("no"), 400), (ZeroDivisionError("x"), 500)])
def test_other_failures_are_not_retried(error: Exception, status: int) -> None:
    async def main() -> None:
        async with served(Playing(error)) as gateway:
            response = await gateway.post(PATHS[0], HELLO)
            assert (response.status_code, response.headers["x-should-retry"]) == (status, "false")
            assert gateway.calls.failure is error

    asyncio.run(main())


@each_api
def test_an_error_in_the_middle_of_a_stream(path: str) -> None:
    async def main() -> None:
        policy = Playing(BUSY)
        policy.first = [Delta("a piece")]
        async with served(policy) as gateway:
            events = await gateway.events(path, {**HELLO, "stream": True})
            name, data = events[-1]
            assert (
                name == {"/v1/chat/completions": "", "/v1/responses": "response.failed", "/v1/messages": "error"}[path]
            )
            assert "the model is not reachable" in data
            assert gateway.calls.failure is BUSY

    asyncio.run(main())


@each_api
@pytest.mark.parametrize(
    ("limits", "outcome"), [({"max_turns": 2}, Outcome.MAX_TURNS), ({"max_tokens": 20}, Outcome.MAX_TOKENS)]
)
def test_calls_beyond_a_limit_are_refused(path: str, limits: dict[str, Any], outcome: Outcome) -> None:
    async def main() -> None:
        policy = Playing(*(saying() for _ in range(2)))
        async with served(policy, **limits) as gateway:
            for _ in range(2):
                assert (await gateway.post(path, HELLO)).status_code == 200
            assert gateway.calls.limit is None
            for _ in range(2):
                refused = await gateway.post(path, HELLO)
                assert (refused.status_code, refused.headers["x-should-retry"]) == (403, "false")
            assert gateway.calls.limit is not None
            assert gateway.calls.limit.outcome is outcome
            assert gateway.calls.over.is_set()
            assert len(policy.asked) == 2

    asyncio.run(main())


def test_call_is_limited_to_the_remaining_tokens() -> None:
    async def main() -> None:
        policy = Playing(saying(), answering("cut", finish_reason="length", n_tokens=5))
        async with served(policy, max_tokens=15) as gateway:
            for _ in range(2):
                await gateway.post(PATHS[0], asking(user("x")))
            assert [result[3] for result in policy.asked] == [15, 5]
            assert gateway.calls.limit is not None
            assert gateway.calls.limit.outcome is Outcome.MAX_TOKENS

    asyncio.run(main())


def test_engine_that_stops_short_has_a_full_context() -> None:
    async def main() -> None:
        async with served(Playing(answering("cut", finish_reason="length", n_tokens=5))) as gateway:
            await gateway.post(PATHS[0], asking(user("x")))
            assert gateway.calls.limit is not None
            assert gateway.calls.limit.outcome is Outcome.CONTEXT_FULL

    asyncio.run(main())


def test_stale_weights_end_the_rollout() -> None:
    async def main() -> None:
        stale = StaleRollout("overtaken", restart=True)
        async with served(Playing(stale)) as gateway:
            for _ in range(2):
                assert (await gateway.post(PATHS[0], HELLO)).status_code == 403
            assert gateway.calls.failure is stale
            assert gateway.calls.limit is None
            assert gateway.calls.over.is_set()

    asyncio.run(main())


def test_only_new_messages_are_recorded() -> None:
    async def main() -> None:
        first = calling(("look", {"a": 1, "b": 2}))
        policy = Playing(first, answering("seen "), saying("third"))
        async with served(policy) as gateway:
            said = [user("look"), {"role": "system", "content": "x"}]
            await gateway.post(PATHS[0], asking(*said))
            # as clients send it back: keys added and reordered, arguments reformatted, null for empty
            function = {"arguments": '{"b":2,"a":1}', "name": "look"}
            echoed = {
                "content": None,
                "role": "assistant",
                "extra": 1,
                "tool_calls": [{"id": "x", "function": function}],
            }
            result = {"role": "tool", "tool_call_id": "x", "content": "a tree"}
            await gateway.post(PATHS[0], asking(*said, echoed, result))
            more = [result, {"role": "assistant", "content": "seen"}, user("and?")]
            await gateway.post(PATHS[0], asking(*said, echoed, *more))
            assert [call.index for call in gateway.records.calls] == [0, 1, 2]
            assert [call.messages for call in gateway.records.calls] == [[user("look\n\nx")], [result], [user("and?")]]

    asyncio.run(main())


def test_rewritten_history_is_recorded_again() -> None:
    async def main() -> None:
        policy = Playing(saying("one"), saying("two"))
        async with served(policy) as gateway:
            await gateway.post(PATHS[0], asking(user("a")))
            rewritten = [user("a"), {"role": "assistant", "content": "something else"}, user("b")]
            await gateway.post(PATHS[0], asking(*rewritten))
            assert [call.messages for call in gateway.records.calls] == [[user("a")], rewritten]

    asyncio.run(main())


def test_all_fields_of_a_completion_are_recorded() -> None:
    async def main() -> None:
        completion = replace(
            saying(), policy_version="7", n_invalid=2, begins="first", mismatch=3, n_cached_tokens=4, stop_reason="END"
        )
        async with served(Playing(completion)) as gateway:
            await gateway.post(PATHS[0], asking(user("a")))
            (call,) = gateway.records.calls
            seen = (call.policy_version, call.n_invalid, call.begins, call.mismatch, call.n_cached_tokens)
            assert seen == ("7", 2, "first", 3, 4)
            assert (call.stop_reason, call.response, call.n_response_tokens) == ("END", completion.response, 10)

    asyncio.run(main())


def test_answer_is_recorded_before_it_is_sent_even_if_its_client_disconnects() -> None:
    async def main() -> None:
        class Slow(Records):
            async def __call__(self, call: ModelCall) -> None:
                writing.set()
                await written.wait()
                await super().__call__(call)

        records, writing, written = Slow(), asyncio.Event(), asyncio.Event()
        calls = GatewayCalls(context_of(Playing(saying()), records))
        answered = asyncio.create_task(calls.complete(ChatApi().parse(HELLO)))
        await writing.wait()
        assert not answered.done()
        answered.cancel()
        await asyncio.gather(answered, return_exceptions=True)
        assert records.calls == []
        written.set()
        await calls.settle()
        assert len(records.calls) == 1

    asyncio.run(main())


def test_sub_agents_call_concurrently() -> None:
    n_agents, n_turns = 10, 4

    def answer(messages: Sequence[Message]) -> Completion:
        return answering(f"answer {len(messages)} to {messages[0]['content']}")

    async def main() -> None:
        policy = Playing(answer=answer)
        policy.gate = asyncio.Event()

        async def agent(found: Served, name: str) -> None:
            said: list[Any] = [user(name)]
            for turn in range(n_turns):
                answered = await found.openai.chat.completions.create(model="m", messages=said)
                text = answered.choices[0].message.content
                assert text == f"answer {len(said)} to {name}"
                said += [{"role": "assistant", "content": text}, user(f"{name} {turn}")]

        async with served(policy, max_turns=1000) as gateway:
            agents = [asyncio.create_task(agent(gateway, f"agent {number}")) for number in range(n_agents)]
            async with asyncio.timeout(120):
                while policy.n_at_once < n_agents:
                    await asyncio.wait(agents, timeout=0.01)
            policy.gate.set()
            await asyncio.gather(*agents)
            calls = gateway.records.calls
            assert sorted(call.index for call in calls) == list(range(n_agents * n_turns))
            assert all(len(call.messages) == 1 for call in calls), "each message once"
            assert policy.most_at_once == n_agents

    asyncio.run(main())


def test_concurrent_calls_do_not_exceed_the_limit_of_turns() -> None:
    async def main() -> None:
        policy = Playing(answer=lambda _: saying())
        policy.gate = asyncio.Event()
        async with served(policy, max_turns=3) as gateway:
            result = [asyncio.create_task(gateway.post(PATHS[0], HELLO)) for _ in range(8)]
            async with asyncio.timeout(120):
                while sum(each.done() for each in result) < 5:
                    await asyncio.wait(result, timeout=0.01)
            policy.gate.set()
            statuses = [response.status_code for response in await asyncio.gather(*result)]
            assert sorted(statuses) == [200] * 3 + [403] * 5

    asyncio.run(main())


def test_hundred_concurrent_clients_over_the_socket(tmp_path: Path) -> None:
    async def main() -> None:
        policy = Playing(answer=lambda messages: saying(f"to {messages[0]['content']}"))
        async with served(policy, folder=tmp_path, max_turns=1000) as gateway:

            async def client(number: int) -> str:
                transport = httpx2.AsyncHTTPTransport(verify=False, uds=str(tmp_path / SOCKET))
                async with httpx2.AsyncClient(transport=transport, timeout=600) as http:
                    url = f"http://farm/t/{gateway.address.key}/v1/chat/completions"
                    response = await http.post(url, json=asking(user(str(number))))
                    return str(response.json()["choices"][0]["message"]["content"])

            assert await asyncio.gather(*map(client, range(100))) == [f"to {number}" for number in range(100)]

    asyncio.run(main())


def test_end_of_the_block_cancels_running_calls(tmp_path: Path) -> None:
    async def main() -> None:
        policy = Playing(saying())
        policy.gate = asyncio.Event()
        records = Records()
        async with httpx2.AsyncClient(trust_env=False) as http:
            async with gateway(GatewayCalls(context_of(policy, records)), tmp_path, tcp=True) as address:
                result = asyncio.create_task(http.post(f"{address.url}/chat/completions", json=HELLO))
                await policy.begun.wait()
            assert policy.cancelled.is_set()
            with pytest.raises(httpx2.TransportError):
                await result
            with pytest.raises(httpx2.ConnectError):
                await http.get(f"{address.url}/models")

    asyncio.run(main())


def test_socket_with_a_long_path_and_an_existing_socket(tmp_path: Path) -> None:
    async def main() -> None:
        folder = tmp_path / ("x" * 120)
        folder.mkdir()
        (tmp_path / "elsewhere").touch(mode=0o600)
        async with gateway(GatewayCalls(context_of(Playing(), Records())), folder):
            assert (folder / SOCKET).is_socket()
            assert (folder / SOCKET).stat().st_mode & 0o777 == 0o777
        (folder / SOCKET).unlink()
        (folder / SOCKET).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OSError, match="in use"):
            async with gateway(GatewayCalls(context_of(Playing(), Records())), folder):
                raise AssertionError
        assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o600

    asyncio.run(main())


def test_official_client_raises_its_named_errors() -> None:
    from openai import BadRequestError, InternalServerError

    async def main() -> None:
        async with served(Playing(FULL, BUSY), max_turns=2) as gateway:
            create = gateway.openai.chat.completions.create
            with pytest.raises(BadRequestError, match="maximum context length"):
                await create(model="m", messages=[user("a")])  # type: ignore[list-item]
            with pytest.raises(InternalServerError):
                await create(model="m", messages=[user("a")])  # type: ignore[list-item]

    asyncio.run(main())
