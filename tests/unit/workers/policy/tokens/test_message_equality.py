"""Clients send messages back in many forms; their meaning is compared, and changes of the meaning are detected."""

from __future__ import annotations

from typing import Any

import pytest

from farm.records.trajectory import Message
from tests.unit.workers.policy.tokens.zoo import assistant, call, system, tool, user
from workers.policy.tokens.conversation_tree import equivalent

CALL = call("call_1", '{"a": 1, "b": [2]}')
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("held", "given"),
    [
        (assistant("a"), {"content": "a", "role": "assistant", "provider_specific_fields": {"x": None}}),
        (assistant("", [CALL]), {**assistant(None, [CALL]), "refusal": None, "function_call": None}),
        (assistant(None, [CALL]), {"role": "assistant", "tool_calls": [CALL]}),
        (assistant("a"), {**assistant("a"), "tool_calls": []}),
        (assistant("a", reasoning="hm"), assistant("a")),
        (assistant("a", reasoning="hm"), {"role": "assistant", "content": "a", "reasoning": "hm"}),
        (assistant("a\n"), assistant("a")),
        (assistant("", [CALL]), assistant("", [call("call_1", '{"b":[2],"a":1}')])),
        (assistant("", [CALL]), assistant("", [{**CALL, "index": 0}])),
        (assistant("", [CALL]), assistant("", [{key: CALL[key] for key in ("type", "function")}])),
        (assistant("", [call("1", "")]), assistant("", [call("1", "{}")])),
        (assistant("", [call("1", "{broken")]), assistant("", [{**call("1", "{broken"), "x": 1}])),
        (user("a"), {"role": "user", "content": [{"type": "text", "text": "a"}]}),
        (user("ab"), {"role": "user", "content": PARTS}),
        (user("a\nb"), {"role": "user", "content": PARTS}),
        (tool("call_1", "a"), {**tool("call_1", "a"), "name": "search"}),
        (tool("call_1", "a"), {"role": "tool", "content": "a"}),
        (system("a"), {**system("a"), "cache_control": {"type": "ephemeral"}}),
    ],
)
def test_equivalent_messages(held: Message, given: Message) -> None:
    assert equivalent(held, given, {}) == {}
    assert equivalent(given, held, {}) == {} or "reasoning_content" in held


@pytest.mark.parametrize(
    ("held", "given"),
    [
        (user("a"), system("a")),
        (user("a"), user("a ")),
        (user(""), user("a")),
        (tool("call_1", "a"), tool("call_2", "a")),
        (tool("call_1", "a"), tool("call_1", "a\n")),
        (assistant("a"), assistant("b")),
        (assistant("a", [CALL]), assistant("a")),
        (assistant("", [CALL]), assistant("", [CALL, CALL])),
        (assistant("", [CALL]), assistant("", [call("call_1", '{"a": 2, "b": [2]}')])),
        (assistant("", [CALL]), assistant("", [call("call_1", '{"a": 1, "b": [2]}', "other")])),
        (assistant("", [call("1", "{broken")]), assistant("", [call("1", "{}")])),
        (assistant("a", reasoning="hm"), assistant("a", reasoning="so")),
        (assistant("", [CALL]), assistant('Calling tools:\n[{"name": "search"}]')),
        (user("a"), {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}),
        ({"role": "user", "content": "a", "name": "x"}, {"role": "user", "content": "a", "name": "y"}),
    ],
)
def test_different_messages(held: Message, given: Message) -> None:
    assert equivalent(held, given, {}) is None


def test_call_ids_of_a_client_are_matched_to_their_results() -> None:
    ids = equivalent(
        assistant("", [CALL, call("call_2")]), assistant("", [call("x", '{"a":1,"b":[2]}'), call("y")]), {}
    )
    assert ids == {"x": "call_1", "y": "call_2"}
    assert equivalent(tool("call_2", "a"), tool("y", "a"), ids) == {}
    assert equivalent(tool("call_2", "a"), tool("x", "a"), ids) is None


def test_pictures_are_compared_exactly() -> None:
    picture: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": "data:a"}}]
    other: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": "data:b"}}]
    assert (
        equivalent({"role": "user", "content": picture}, {"role": "user", "content": list(picture), "x": 1}, {}) == {}
    )
    assert equivalent({"role": "user", "content": picture}, {"role": "user", "content": other}, {}) is None
