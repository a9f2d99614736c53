"""Threads of the messages API, by hand and with the official client, which uses them without being asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.workers.policy.gateway.serving import Playing, Served, served
from workers.testing import answering, calling

TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
SYSTEM = {"role": "system", "content": "be brief"}


async def post(gateway: Served, **fields: Any) -> tuple[int, dict[str, Any]]:
    response = await gateway.post("/v1/messages", {"model": "m", "max_tokens": 100, **fields})
    return response.status_code, response.json()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_thread_is_continued_with_its_system_prompt_tools_and_messages() -> None:
    async def main() -> None:
        policy = Playing(answering("one"), answering("two"), answering("three"))
        async with served(policy) as gateway:
            created = {"thread": {"type": "create"}, "system": "be brief", "tools": [TOOL]}
            _, first = await post(gateway, messages=[user("a")], **created)
            again = {"type": "continue", "previous_message_id": first["id"]}
            _, second = await post(gateway, messages=[user("b")], thread=again)
            last = {"type": "continue", "previous_message_id": second["id"]}
            await post(gateway, messages=[user("c")], thread=last)
        said = [
            *(SYSTEM, user("a"), {"role": "assistant", "content": "one"}, user("b")),
            *({"role": "assistant", "content": "two"}, user("c")),
        ]
        assert [messages for messages, *_ in policy.asked] == [said[:2], said[:4], said]
        assert [[tool["function"]["name"] for tool in tools] for _, tools, *_ in policy.asked] == [["look"]] * 3
        # only the new messages of each call are recorded
        assert [len(call.messages) for call in gateway.records.calls] == [2, 1, 1]

    asyncio.run(main())


@pytest.mark.parametrize("streamed", [False, True])
def test_official_tool_runner_keeps_its_conversation(streamed: bool) -> None:
    # imported late, as in the other tests: it takes a second
    import anthropic

    async def main() -> None:
        policy = Playing(calling(("look", {"path": "x"})), answering("it is a tree"))

        @anthropic.beta_async_tool
        async def look(path: str) -> str:
            """Look at a file.

            Args:
                path: Which.
            """
            return f"{path}: a tree"

        async with served(policy) as gateway:
            client = anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.address.key, max_retries=0)
            runner: Any = client.beta.messages.tool_runner(
                model="m",
                max_tokens=100,
                system="be brief",
                tools=[look],
                messages=[{"role": "user", "content": "look at x"}],
                stream=streamed,
            )
            async for each in runner:
                if streamed:
                    async for _ in each:
                        pass
        shown = policy.asked[1][0]
        assert [message["role"] for message in shown] == ["system", "user", "assistant", "tool"]
        assert shown[:2] == [SYSTEM, user("look at x")]
        assert shown[3]["content"] == "x: a tree"
        assert policy.asked[0][1] == policy.asked[1][1] != []

    asyncio.run(main())


def test_official_client_replays_a_thread_that_is_not_held() -> None:
    import anthropic

    async def main() -> None:
        policy = Playing(*(answering(word) for word in ("one", "two", "three")))
        async with served(policy) as before, served(policy) as after:
            client = anthropic.AsyncAnthropic(base_url=before.url, api_key=before.address.key, max_retries=0)
            thread = client.beta.messages.thread(model="m", max_tokens=100, system="be brief", messages=[])
            await thread.send({"role": "user", "content": "a"})
            # as after a restart: another server, without threads
            client.base_url = after.url
            await thread.send({"role": "user", "content": "b"})
        replayed = [SYSTEM, user("a"), {"role": "assistant", "content": "one"}, user("b")]
        assert policy.asked[-1][0] == replayed

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"thread": {"type": "continue", "previous_message_id": "msg_never"}}, 404, "thread_not_found"),
        ({"thread": {"type": "continue"}}, 400, "thread.previous_message_id: must be a text"),
        ({"thread": {"type": "continue", "previous_message_id": 7}}, 400, "thread.previous_message_id: must be a text"),
        ({"thread": {"type": "resume"}}, 400, "thread: must be an object"),
        ({"thread": "create"}, 400, "thread: must be an object"),
        ({"thread": []}, 400, "thread: must be an object"),
        ({"thread": {"type": "create"}, "messages": []}, 400, "messages: no message to answer"),
        ({"messages": []}, 400, "messages: no message to answer"),
        ({"compaction": {"type": "enabled"}}, 400, "compaction: "),
        ({"container": "c1"}, 400, "container: "),
    ],
)
def test_fields_that_carry_conversation_are_refused_by_name(fields: dict[str, Any], status: int, says: str) -> None:
    async def main() -> None:
        policy = Playing(answering("never"))
        async with served(policy) as gateway:
            got, body = await post(gateway, **{"messages": [user("a")], **fields})
            assert (got, body["type"]) == (status, "error")
            assert says in str(body["error"])
        assert policy.asked == []

    asyncio.run(main())


@pytest.mark.parametrize("changed", [{"system": "be long"}, {"tools": [{**TOOL, "name": "other"}]}])
def test_thread_refuses_another_system_prompt_or_other_tools(changed: dict[str, Any]) -> None:
    async def main() -> None:
        policy = Playing(answering("one"), answering("two"))
        async with served(policy) as gateway:
            created = {"thread": {"type": "create"}, "system": "be brief", "tools": [TOOL]}
            _, first = await post(gateway, messages=[user("a")], **created)
            again = {"type": "continue", "previous_message_id": first["id"]}
            status, body = await post(gateway, messages=[user("b")], thread=again, **changed)
            assert (status, body["error"]["details"]["error_code"]) == (400, "thread_fingerprint_mismatch")
            # repeating the same ones is accepted
            status, _ = await post(gateway, messages=[user("b")], thread=again, system="be brief", tools=[TOOL])
            assert status == 200

    asyncio.run(main())


def test_threads_of_another_rollout_are_not_accessible() -> None:
    async def main() -> None:
        policy = Playing(answering("one"))
        async with served(policy) as mine, served(Playing(answering("two"))) as other:
            _, first = await post(mine, messages=[user("a")], thread={"type": "create"})
            again = {"type": "continue", "previous_message_id": first["id"]}
            assert (await post(other, messages=[user("b")], thread=again))[0] == 404

    asyncio.run(main())


def test_answer_without_a_thread_cannot_be_continued() -> None:
    async def main() -> None:
        async with served(Playing(answering("one"))) as gateway:
            _, first = await post(gateway, messages=[user("a")])
            again = {"type": "continue", "previous_message_id": first["id"]}
            assert (await post(gateway, messages=[user("b")], thread=again))[0] == 404

    asyncio.run(main())


def test_one_answer_can_be_continued_twice() -> None:
    async def main() -> None:
        policy = Playing(*(answering(word) for word in ("one", "two", "three")))
        async with served(policy) as gateway:
            _, first = await post(gateway, messages=[user("a")], thread={"type": "create"})
            again = {"type": "continue", "previous_message_id": first["id"]}
            await post(gateway, messages=[user("b")], thread=again)
            await post(gateway, messages=[user("c")], thread=again)
        one = {"role": "assistant", "content": "one"}
        assert [messages for messages, *_ in policy.asked[1:]] == [[user("a"), one, user(x)] for x in "bc"]

    asyncio.run(main())
