"""Fields that would change the conversation or the answer: refused by name, never ignored."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.workers.policy.gateway.serving import Playing, served
from workers.testing import answering

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (RESPONSES, {"conversation": "conv_1"}, "conversation"),
        (RESPONSES, {"conversation": {"id": "conv_1"}}, "conversation"),
        (RESPONSES, {"prompt": {"id": "pmpt_1", "variables": {}}}, "prompt"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"input": None}, "input"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"previous_response_id": "resp_never"}, "previous_response_id"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"functions": [{"name": "look", "parameters": {}}]}, "functions"),
        (CHAT, {"function_call": "auto"}, "function_call"),
        (CHAT, {"audio": {"voice": "x", "format": "wav"}}, "audio"),
        (CHAT, {"n": 2}, "n"),
    ],
)
def test_field_that_changes_the_request_is_refused(path: str, fields: dict[str, Any], names: str) -> None:
    async def main() -> None:
        policy = Playing(answering("never"))
        async with served(policy) as gateway:
            known = {"model": "m", **({"messages": HELLO} if path == CHAT else {"input": HELLO})}
            response = await gateway.post(path, {**known, **fields})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, names)
            assert error["message"].startswith(f"{names}: ")
        assert policy.asked == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSES, {"conversation": None, "prompt": None, "background": False, "previous_response_id": None}),
        (CHAT, {"functions": [], "function_call": None, "audio": None, "n": 1}),
    ],
)
def test_field_with_a_neutral_value_is_accepted(path: str, fields: dict[str, Any]) -> None:
    async def main() -> None:
        async with served(Playing(answering("yes"))) as gateway:
            known = {"model": "m", **({"messages": HELLO} if path == CHAT else {"input": HELLO})}
            response = await gateway.post(path, {**known, **fields})
            assert response.status_code == 200, response.text

    asyncio.run(main())
