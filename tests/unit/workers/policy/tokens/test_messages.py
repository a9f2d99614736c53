"""The size of a request, exact and as a bound."""

from __future__ import annotations

from typing import Any

import pytest

from workers.policy.tokens.messages import n_chars, n_chars_at_most

CALL = {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"required": ["command"]}}}]
MESSAGES: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "text": [{"role": "user", "content": "two words"}],
    "wide characters": [{"role": "user", "content": "\u5b57\U0001f600" * 50}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": 'a\n"b"'}, {"type": "text", "text": "c"}]}],
    "calls": [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
    "numbers": [{"role": "tool", "content": "x", "n": 1.5, "flag": True, "of": {"a": [1, 2, 3]}}],
    "no JSON": [{"role": "tool", "content": "x", "extra": {1: 2**70}}],
}


@pytest.mark.parametrize("name", MESSAGES)
def test_upper_bound_is_at_least_the_exact_count_and_close_to_it(name: str) -> None:
    messages = MESSAGES[name]
    exact = n_chars(messages, TOOLS)
    assert exact <= n_chars_at_most(messages, TOOLS) <= 3 * exact + 10


def test_plain_text_is_counted_exactly() -> None:
    messages = [{"role": "user", "content": "\x00\n" * 1000}]
    assert n_chars(messages, []) == n_chars_at_most(messages, []) - len("[[]]") == 2004
