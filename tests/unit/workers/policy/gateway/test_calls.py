"""Labels, models of roles, and requests that are sent again because their answers were not read."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import Any

import httpx2
import pytest

from farm.errors import EngineError
from farm.records.request import AgentRequests, TrainCalls
from farm.records.trajectory import segments
from farm.row_builders import chosen_calls
from tests.unit.workers.policy.gateway.serving import Playing, Records, served
from workers.plugins import plugin_values
from workers.policy.gateway.app import application
from workers.policy.gateway.gateway_http import MAX_BODY_BYTES
from workers.testing import ScriptedModel, answering, calling

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GOOGLE, GOOGLE_COUNT = "/v1beta/models/m:generateContent", "/v1beta/models/m:countTokens"
HELLO = {"role": "user", "content": "hello"}
BODY = {"model": "m", "messages": [HELLO]}
PICTURES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{**HELLO, "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
    RESPONSES: {"input": [{**HELLO, "content": [{"type": "input_image", "image_url": "data:"}]}]},
    MESSAGES: {
        "messages": [
            HELLO,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "read", "input": {}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": {}}]}],
            },
        ]
    },
    GOOGLE: {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": ""}}]}]},
}


class _SlowRecords(Records):
    """A record that is written only once its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()

    async def __call__(self, call: Any) -> None:
        self.begun.set()
        await self.gate.wait()
        await super().__call__(call)


@pytest.mark.parametrize("stream", [False, True])
def test_unread_answer_is_given_to_the_retry(stream: bool) -> None:
    async def main() -> None:
        policy, records = Playing(answering("once"), answering("more")), _SlowRecords()
        async with served(policy) as gateway:
            gateway.calls._context.record = records
            body = {**BODY, "stream": stream}
            async with httpx2.AsyncClient(trust_env=False) as leaving:
                asking = asyncio.create_task(leaving.post(gateway.url + CHAT, json=body))
                await records.begun.wait()
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            async with asyncio.timeout(60):
                while not gateway.calls._recent.n_unread:  # noqa: ASYNC110 - it is the state of a server
                    await asyncio.sleep(0.005)
            records.gate.set()
            again = await gateway.post(CHAT, body)
            assert again.status_code == 200
            assert "once" in again.text
            assert len(policy.asked) == len(records.calls) == 1, "one turn is sampled and recorded once"
            # an answer that was read is not reused: the same request is a new turn
            assert "more" in (await gateway.post(CHAT, body)).text
            assert len(records.calls) == 2

    asyncio.run(main())


def test_partially_read_answer_is_given_to_the_retry() -> None:
    body = {**BODY, "stream": True}

    async def main() -> None:
        policy = Playing(answering("once, and so on and on"), answering("more"))
        async with served(policy) as gateway:
            stuck, gone, asked = asyncio.Event(), asyncio.Event(), iter([json.dumps(body).encode()])

            async def receive() -> dict[str, Any]:
                if (text := next(asked, None)) is not None:
                    return {"type": "http.request", "body": text, "more_body": False}
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                if b"once" in message.get("body", b""):
                    stuck.set()
                    await asyncio.Event().wait()

            scope = {"type": "http", "method": "POST", "path": f"/t/k{CHAT}", "query_string": b"", "headers": []}
            app: Any = application(gateway.calls, "k")
            reading: asyncio.Task[None] = asyncio.create_task(app(scope, receive, send))
            async with asyncio.timeout(60):
                await stuck.wait()
                while not gateway.records.calls:  # noqa: ASYNC110 - it is the state of a server
                    await asyncio.sleep(0.005)
                gone.set()
                await reading
            assert "so on" in (await gateway.post(CHAT, body)).text
            assert len(policy.asked) == len(gateway.records.calls) == 1, "one turn is sampled and recorded once"

    asyncio.run(main())


@pytest.mark.parametrize("retryable", [True, False])
def test_failed_role_model_is_not_scored_as_an_answer(retryable: bool) -> None:
    """But if it refuses a request, only that request is answered with an error."""

    async def main() -> None:
        broken = EngineError("role helper: it is gone")
        broken.retryable = retryable
        body = {**BODY, "model": "helper"}
        async with served(Playing(), models={"helper": ScriptedModel(broken, "a title")}) as gateway:
            assert (await gateway.post(CHAT, body)).status_code >= 400
            assert (gateway.calls.failure is broken) is retryable
            assert "a title" in (await gateway.post(CHAT, body)).text
            assert gateway.calls.failure is None, "it was answered at another attempt"

    asyncio.run(main())


def test_request_cannot_exclude_its_call_from_training() -> None:
    async def main() -> None:
        async with served(Playing(answer=lambda _: answering("yes"))) as gateway:
            spoilt = {"role": "judge", "trains": "no", "guided": "yes", "depth": "7", "tools": "9"}
            headers = {f"X-Label-{name}": value for name, value in spoilt.items()}
            crowd = {f"n{number}": "x" for number in range(40)}
            await gateway.http.post(gateway.url + CHAT, json={**BODY, "metadata": spoilt | crowd}, headers=headers)
            (call,) = gateway.records.calls
            assert {"role", "trains", "guided"}.isdisjoint(call.labels)
            assert (call.labels["model"], call.labels["depth"]) == ("m", "0"), "its own labels are not displaced"
            assert chosen_calls(TrainCalls(), [call]) == [call]

    asyncio.run(main())


def test_arguments_of_a_call_are_not_pictures() -> None:
    given = {"type": "file", "image": [{"type": "image"}], "content": [{"type": "document"}]}
    used = {"type": "tool_use", "id": "1", "name": "find", "input": given}
    asked = [HELLO, {"role": "assistant", "content": [used]}, HELLO]

    async def main() -> None:
        policy = Playing(answering("yes"))
        async with served(policy, requests=AgentRequests(images="text")) as gateway:
            assert (await gateway.post(MESSAGES, {"model": "m", "messages": asked})).status_code == 200
            (call,) = policy.asked[0][0][1]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == given

    asyncio.run(main())


def test_role_model_answers_its_requests_and_never_trains() -> None:
    async def main() -> None:
        helper = ScriptedModel("a title")
        policy = Playing(answering("work"))
        async with served(policy, models={"helper": helper}, max_turns=3) as gateway:
            for stream in (False, True):
                response = await gateway.post(CHAT, {**BODY, "model": "helper", "stream": stream})
                assert "a title" in response.text
            assert policy.asked == []
            assert "work" in (await gateway.post(CHAT, BODY)).text
            roles = [call.labels.get("role") for call in gateway.records.calls]
            assert roles == ["helper", "helper", None]
            assert [call.index for call in gateway.records.calls] == [0, 1, 2]
            assert not any(call.token_exact for call in gateway.records.calls[:2])
            assert segments(gateway.records.calls[:2]) == ()
            listed = [each.id async for each in gateway.openai.models.list()]
            assert listed == ["policy", "helper"]

    asyncio.run(main())


def test_tools_of_a_request_are_recorded_with_its_call() -> None:
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "maximum": 2**64 - 1}}}

    async def main() -> None:
        policy = Playing(answering("work"), answering("on"))
        async with served(policy, models={"helper": ScriptedModel("a title")}, max_turns=3) as gateway:
            await gateway.post(CHAT, {**BODY, "tools": [look]})
            await gateway.post(CHAT, {**BODY, "model": "helper", "tools": [look, look]})
            await gateway.post(CHAT, {**BODY, "messages": [HELLO, HELLO]})
            assert [call.tools for call in gateway.records.calls] == [[look], [look, look], []]
            assert [list(asked[1]) for asked in policy.asked] == [[look], []]
            for call in gateway.records.calls:
                plugin_values.record(call, "b.0.0")

    asyncio.run(main())


def test_calls_have_labels() -> None:
    async def main() -> None:
        async with served(Playing(answer=lambda _: answering("yes"))) as gateway:
            headers = {"X-OpenAI-Subagent": "review", "session_id": "s1", "X-Label-Purpose": "title"}
            headers["user-agent"] = "x/1"
            body = {**BODY, "user": "u", "metadata": {"trace": "t", "n": 3}}
            await gateway.http.post(gateway.url + CHAT, json=body, headers=headers)
            said = [HELLO, {"role": "assistant", "content": "yes"}, HELLO]
            await gateway.post(MESSAGES, {"model": "small", "messages": said, "metadata": {"user_id": "abc"}})
            first, second = (call.labels for call in gateway.records.calls)
            assert first == {
                **{"model": "m", "user": "u", "trace": "t", "subagent": "review", "session": "s1"},
                **{"purpose": "title", "client": "x/1", "depth": "0", "tools": "0"},
            }
            assert (second["model"], second["user_id"], second["depth"]) == ("small", "abc", "1")

    asyncio.run(main())


@pytest.mark.parametrize("path", PICTURES)
def test_pictures_are_refused_by_name_or_replaced_by_a_text(path: str) -> None:
    async def main() -> None:
        async with served(Playing(answering("never"))) as gateway:
            response = await gateway.post(path, PICTURES[path])
            assert response.status_code == 400
            assert "image" in response.text or "inlineData" in response.text
        policy = Playing(answering("seen"))
        async with served(policy, requests=AgentRequests(images="text")) as gateway:
            assert (await gateway.post(path, PICTURES[path])).status_code == 200
            assert policy.asked[0][0][-1]["content"] in ("[image left out]", "[media left out]")

    asyncio.run(main())


def by_tool(*content: Any) -> dict[str, Any]:
    used = {"type": "tool_use", "id": "1", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": list(content)}
    return {"messages": [HELLO, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]}


def by_function(**response: Any) -> dict[str, Any]:
    picture = {"inlineData": {"mimeType": "image/png", "data": ""}}
    result = {"name": "read", "parts": [picture]} | ({"response": response} if response else {})
    return {"contents": [{"parts": [{"functionResponse": result}]}]}


IN_SYSTEM = {"parts": [{"inlineData": {"mimeType": "image/png", "data": ""}}]}
TEXT_SOURCE = {"type": "text", "media_type": "text/plain", "data": "its text"}
CONTENT_SOURCE = {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "image", "source": {}}]}


@pytest.mark.parametrize(
    ("path", "body", "shown"),
    [
        (MESSAGES, by_tool({"type": "document", "source": {"type": "base64"}}), "[document left out]"),
        (MESSAGES, by_tool({"type": "document", "title": "T", "source": TEXT_SOURCE}), "T\nits text"),
        (MESSAGES, by_tool({"type": "document", "source": CONTENT_SOURCE}), "a\n[image left out]"),
        (MESSAGES, by_tool({"type": "document", "source": {"type": "content", "content": "a"}}), "a"),
        (MESSAGES, {"system": [{"type": "image", "source": {}}], "messages": [HELLO]}, "[image left out]"),
        (CHAT, {"messages": [{**HELLO, "content": [{"type": "video_url"}]}]}, "[video left out]"),
        (GOOGLE, by_function(output="read"), "read\n[media left out]"),
        (GOOGLE, by_function(size=1), '{"size":1,"media":"[media left out]"}'),
        (GOOGLE, by_function(), '{"media":"[media left out]"}'),
        (GOOGLE, {"contents": "x", "system_instruction": IN_SYSTEM}, "[media left out]"),
        (GOOGLE_COUNT, {"generateContentRequest": by_function()}, ""),
    ],
)
def test_omitted_media_never_end_a_rollout(path: str, body: dict[str, Any], shown: str) -> None:
    async def main() -> None:
        policy = Playing(answering("seen"))
        async with served(policy, requests=AgentRequests(images="text")) as gateway:
            response = await gateway.post(path, body)
            assert response.status_code == 200, response.text
            assert shown in [message["content"] for asked in policy.asked for message in asked[0]] or not shown

    asyncio.run(main())


def test_compressed_bodies() -> None:
    import orjson

    plain = orjson.dumps(BODY)
    bomb = gzip.compress(b" " * (MAX_BODY_BYTES + 1))
    cases: list[tuple[str, bytes, int, str]] = [
        ("gzip", gzip.compress(plain), 200, "yes"),
        ("GZIP", gzip.compress(plain), 200, "yes"),
        ("deflate", zlib.compress(plain), 200, "yes"),
        ("identity", plain, 200, "yes"),
        ("gzip", plain, 400, "gzip"),
        ("gzip", gzip.compress(plain)[:-9], 400, "truncated"),
        ("gzip", bomb, 413, "bytes"),
        ("br", plain, 415, "'br'"),
        ("gzip, gzip", plain, 415, "gzip"),
    ]

    async def main() -> None:
        async with served(Playing(answer=lambda _: answering("yes"))) as gateway:
            for encoding, data, status, text in cases:
                response = await gateway.http.post(
                    gateway.url + CHAT, content=data, headers={"content-encoding": encoding}
                )
                assert response.status_code == status, (encoding, response.text)
                assert text in response.text

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses/compact"])
def test_unsupported_endpoints_are_reported(path: str) -> None:
    async def main() -> None:
        async with served(Playing()) as gateway:
            response = await gateway.post(path, {"model": "m", "input": "hello"})
            assert response.status_code == 404
            assert "not supported" in response.json()["error"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_disallowed_tools_are_recorded_and_not_returned(stream: bool) -> None:
    def function(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}

    async def main() -> None:
        both, other, none = calling(("look", {}), ("delete", {})), calling(("delete", {}), content="so"), answering("x")
        allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        body = {**BODY, "tools": [function("look"), function("delete")], "tool_choice": choice, "stream": stream}
        async with served(Playing(both, other, none)) as gateway:
            texts = [(await gateway.post(CHAT, body)).text for _ in range(3)]
            assert ["look" in text for text in texts] == [True, False, False]
            assert not any("delete" in text for text in texts)
            assert '"finish_reason":"tool_calls"' in texts[0]
            assert '"finish_reason":"stop"' in texts[1]
            sampled = [call.response.get("tool_calls") or [] for call in gateway.records.calls]
            assert [[each["function"]["name"] for each in calls] for calls in sampled] == [
                ["look", "delete"],
                ["delete"],
                [],
            ]
            assert [call.begins for call in gateway.records.calls] == [""] * 3

    asyncio.run(main())
