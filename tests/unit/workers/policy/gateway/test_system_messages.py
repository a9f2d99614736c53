"""System messages at any position, and templates that require one at the beginning."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.workers.policy.gateway.serving import Playing, served
from workers.policy.gateway.calls import one_leading
from workers.testing import answering


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


TOOL = {"role": "tool", "tool_call_id": "c", "content": "r"}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([], []),
        ([user("a")], [user("a")]),
        ([system("a")], [system("a")]),
        ([system("a"), user("b")], [system("a"), user("b")]),
        ([system("a"), system("b"), user("c")], [system("a\n\nb"), user("c")]),
        ([system("a"), user("b"), system("c")], [system("a"), user("b\n\nc")]),
        ([system("a"), user("b"), system("c"), user("d")], [system("a"), user("b\n\nc\n\nd")]),
        ([user("b"), said("x"), system("c")], [user("b"), said("x"), user("c")]),
        ([user("b"), said("x"), system("c"), user("d")], [user("b"), said("x"), user("c\n\nd")]),
        ([user("b"), said("x"), TOOL, system("c")], [user("b"), said("x"), TOOL, user("c")]),
        ([user("b"), said("x"), TOOL, system("c"), system("d")], [user("b"), said("x"), TOOL, user("c\n\nd")]),
        ([said("x"), system("c"), said("y")], [said("x"), user("c"), said("y")]),
        # consecutive user messages are left as they are
        ([user("a"), user("b")], [user("a"), user("b")]),
        ([user("a"), user("b"), system("c"), user("d"), user("e")], [user("a"), user("b\n\nc\n\nd"), user("e")]),
    ],
)
def test_one_system_message_leads(given: list[dict[str, Any]], shown: list[dict[str, Any]]) -> None:
    assert one_leading(given) == shown
    # messages before an answer are shown unchanged in front of it
    answered = [*given, said("!"), system("later"), user("more")]
    assert one_leading(answered)[: len(shown) + 1] == [*shown, said("!")]


_ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "developer", "content": "a"},
            system("b"),
            user("c"),
            {"role": "developer", "content": "d"},
        ]
    },
    "/v1/responses": {"instructions": "a", "input": [system("b"), user("c"), {"role": "developer", "content": "d"}]},
    "/v1/messages": {"max_tokens": 9, "system": "a", "messages": [system("b"), user("c"), system("d")]},
}


@pytest.mark.parametrize("path", _ROUTES)
def test_every_api_shows_the_policy_one_system_message(path: str) -> None:
    async def main() -> None:
        policy = Playing(answering("x"))
        async with served(policy) as gateway:
            response = await gateway.post(path, {"model": "m", **_ROUTES[path]})
            assert response.status_code == 200, response.text
        assert policy.asked[0][0] == [system("a\n\nb"), user("c\n\nd")]
        assert gateway.records.calls[0].messages == policy.asked[0][0]

    asyncio.run(main())


def test_instructions_of_a_continued_response_stay_first() -> None:
    async def main() -> None:
        policy = Playing(answering("x"), answering("y"))
        async with served(policy) as gateway:
            first = (await gateway.post("/v1/responses", {"instructions": "a", "input": "b"})).json()
            more = {"instructions": "a", "previous_response_id": first["id"], "input": "c"}
            await gateway.post("/v1/responses", more)
        assert policy.asked[1][0] == [system("a"), user("b"), said("x"), user("c")]

    asyncio.run(main())
