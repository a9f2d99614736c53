"""Repetition by a policy in a program: detected from the conversation that the program continues, in any API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from farm.errors import EngineError, LimitReached
from farm.records.rollout import Outcome
from tests.unit.workers.policy.gateway.serving import Playing, Served, saying, served
from workers.plugins.interfaces import Completion
from workers.testing import ScriptedModel, calling

Body = dict[str, Any]
Program = Callable[[Any, str], list[Any]]
"""Builds the messages that a program adds to its conversation from an answer and the result of its call."""

USER = {"role": "user", "content": "begin"}
LOOK = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}


def looking(number: int = 0) -> Completion:
    """Return the same call again, with a new id."""
    completion = calling(("look", {"at": "tree", "n": 1}))
    completion.response["tool_calls"][0]["id"] = f"call_{number}"
    return completion


def chat(answer: Any, result: str) -> list[Any]:
    message = answer["choices"][0]["message"]
    called = message["tool_calls"][0]
    # clients reformat the arguments
    called["function"]["arguments"] = '{ "n": 1, "at": "tree" }'
    return [message, {"role": "tool", "tool_call_id": called["id"], "content": result}]


def responses(answer: Any, result: str) -> list[Any]:
    called = next(item for item in answer["output"] if item["type"] == "function_call")
    return [*answer["output"], {"type": "function_call_output", "call_id": called["call_id"], "output": result}]


def anthropic(answer: Any, result: str) -> list[Any]:
    used = next(block for block in answer["content"] if block["type"] == "tool_use")
    shown = {"type": "tool_result", "tool_use_id": used["id"], "content": result}
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [shown]}]


def google(answer: Any, result: str) -> list[Any]:
    shown = {"functionResponse": {"name": "look", "response": {"output": result}}}
    return [answer["candidates"][0]["content"], {"role": "user", "parts": [shown]}]


APIS: dict[str, tuple[str, str, Body, Any, Program]] = {
    "chat": ("/v1/chat/completions", "messages", {"tools": [{"type": "function", "function": LOOK}]}, USER, chat),
    "responses": ("/v1/responses", "input", {"tools": [{"type": "function", **LOOK}]}, USER, responses),
    "anthropic": (
        "/v1/messages",
        "messages",
        {"max_tokens": 50, "tools": [{"name": "look", "input_schema": LOOK["parameters"]}]},
        USER,
        anthropic,
    ),
    "google": (
        "/v1beta/models/m:generateContent",
        "contents",
        {"tools": [{"functionDeclarations": [{"name": "look", "description": "look"}]}]},
        {"role": "user", "parts": [{"text": "begin"}]},
        google,
    ),
}


async def turns(gateway: Served, api: str, *results: str) -> int:
    """Continue a conversation, with a result of the call after each turn; return the status of the last request."""
    path, field, more, begin, program = APIS[api]
    conversation = [begin]
    status = 0
    for result in (*results, ""):
        response = await gateway.post(path, {"model": "m", **more, field: conversation})
        status = response.status_code
        if status != 200:
            break
        conversation += program(response.json(), result)
    return status


def outcome_of(gateway: Served) -> Outcome | None:
    return None if gateway.calls.limit is None else gateway.calls.limit.outcome


@pytest.mark.parametrize("api", APIS)
def test_equal_turns_end_the_rollout(api: str) -> None:
    async def main() -> None:
        policy = Playing(*map(looking, range(9)))
        async with served(policy, max_repeats=3) as gateway:
            assert await turns(gateway, api, *["a tree"] * 8) == 403
            assert outcome_of(gateway) is Outcome.REPEATING
            assert gateway.calls.over.is_set()
            # the answers of three turns were given, and the fourth was not sampled
            assert len(policy.asked) == len(gateway.records.calls) == 3

    asyncio.run(main())


@pytest.mark.parametrize("api", APIS)
def test_other_results_of_the_same_call_do_not_end_the_rollout(api: str) -> None:
    async def main() -> None:
        async with served(Playing(*map(looking, range(5))), max_repeats=2) as gateway:
            assert await turns(gateway, api, "1", "2", "1", "3") == 200
            assert gateway.calls.limit is None

    asyncio.run(main())


def test_alternating_turns_end_the_rollout() -> None:
    async def main() -> None:
        policy = Playing(*(calling(("look", {"at": at})) for at in "ababababab"))
        async with served(policy, max_repeats=4) as gateway:
            body: list[Any] = [USER]
            for _ in range(6):
                answer = await gateway.post("/v1/chat/completions", {"messages": body})
                message = answer.json()["choices"][0]["message"]
                call_id = message["tool_calls"][0]["id"]
                body += [message, {"role": "tool", "tool_call_id": call_id, "content": "a tree"}]
            assert (await gateway.post("/v1/chat/completions", {"messages": body})).status_code == 403
            assert outcome_of(gateway) is Outcome.REPEATING
            assert len(policy.asked) == 6

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_equal_texts_count_as_turns_by_the_programs_replies(stream: bool) -> None:
    async def main() -> None:
        body: list[Any] = [USER]
        async with served(Playing(answer=lambda _: saying("So.")), max_repeats=2) as gateway:
            for said, status in [("Call a tool.", 200), ("A tool!", 200), ("A tool!", 403)]:
                body += [{"role": "assistant", "content": "So."}, {"role": "user", "content": said}]
                request = {"messages": body, "stream": stream}
                assert (await gateway.post("/v1/chat/completions", request)).status_code == status, said
            assert outcome_of(gateway) is Outcome.REPEATING

    asyncio.run(main())


def test_repeated_first_request_is_no_repetition() -> None:
    async def main() -> None:
        async with served(Playing(answer=lambda _: saying("4")), max_repeats=2) as gateway:
            for _ in range(9):
                assert (await gateway.post("/v1/chat/completions", {"messages": [USER]})).status_code == 200

    asyncio.run(main())


def test_each_conversation_has_its_own_turns() -> None:
    async def main() -> None:
        async with served(Playing(*map(looking, range(9))), max_repeats=3) as gateway:
            both = [turns(gateway, "chat", "a tree", "a tree") for _ in range(3)]
            assert await asyncio.gather(*both) == [200] * 3
            assert gateway.calls.limit is None

    asyncio.run(main())


def test_program_that_drops_old_messages_is_still_detected() -> None:
    async def main() -> None:
        policy = Playing(*map(looking, range(9)))
        async with served(policy, max_repeats=3) as gateway:
            conversation: list[Any] = [USER]
            for n in range(4):
                kept = [{"role": "user", "content": f"Summary {n}."}, *conversation[-6:]]
                response = await gateway.post("/v1/chat/completions", {"messages": kept})
                if response.status_code == 200:
                    conversation += chat(response.json(), "a tree")
            assert outcome_of(gateway) is Outcome.REPEATING
            assert len(policy.asked) == 3

    asyncio.run(main())


def test_repetition_is_checked_before_the_number_of_turns() -> None:
    async def main() -> None:
        async with served(Playing(*map(looking, range(9))), max_repeats=3, max_turns=3) as gateway:
            assert await turns(gateway, "chat", *["a tree"] * 8) == 403
            assert outcome_of(gateway) is Outcome.REPEATING

    asyncio.run(main())


def test_retried_request_is_no_turn() -> None:
    async def main() -> None:
        policy = Playing(looking(0), EngineError("busy"), EngineError("busy"), looking(1))
        async with served(policy, max_repeats=2) as gateway:
            first = await gateway.post("/v1/chat/completions", {"messages": [USER]})
            body = {"messages": [USER, *chat(first.json(), "a tree")]}
            statuses = [(await gateway.post("/v1/chat/completions", body)).status_code for _ in range(3)]
            assert statuses == [503, 503, 200]
            assert gateway.calls.limit is None

    asyncio.run(main())


def test_answers_of_another_model_are_not_turns_of_the_policy() -> None:
    async def main() -> None:
        helper = ScriptedModel(*["So."] * 9)
        async with served(Playing(), models={"helper": helper}, max_repeats=2) as gateway:
            body: list[Any] = [USER]
            for _ in range(5):
                answer = await gateway.post("/v1/chat/completions", {"model": "helper", "messages": body})
                assert answer.status_code == 200
                body += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}]
            assert gateway.calls.limit is None

    asyncio.run(main())


def test_earlier_end_of_the_rollout_is_kept() -> None:
    async def main() -> None:
        policy = Playing(looking(0), looking(1), LimitReached(Outcome.MAX_TOKENS, "all"))
        async with served(policy, max_repeats=3) as gateway:
            assert await turns(gateway, "chat", "a tree", "a tree", "a tree") == 403
            body = {"messages": [USER, *[{"role": "assistant", "content": "So."}, USER] * 3]}
            assert (await gateway.post("/v1/chat/completions", body)).status_code == 403
            assert outcome_of(gateway) is Outcome.MAX_TOKENS

    asyncio.run(main())


def test_long_conversations_are_compared_in_a_thread() -> None:
    """Meanwhile the event loop serves other rollouts of the worker."""

    async def main() -> None:
        async with served(Playing(*map(looking, range(9))), max_repeats=3) as gateway:
            assert await turns(gateway, "chat", *["a tree" * 100_000] * 8) == 403
            assert outcome_of(gateway) is Outcome.REPEATING

    asyncio.run(main())
