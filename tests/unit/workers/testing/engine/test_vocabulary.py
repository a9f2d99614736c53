from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.records.trajectory import token_ids
from workers.testing.engine.model_text import make_tokenizer
from workers.testing.engine.vocabulary import Vocabulary
from workers.testing.hermes_text import written

WORDS = Vocabulary(make_tokenizer())
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "x", "type": "function", "function": {"name": "bash", "arguments": '{"command": "echo \'ü\' <b>"}'}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "x", "content": "4"},
    {"role": "tool", "tool_call_id": "y", "content": "5"},
]


def test_messages_are_parsed_from_ids() -> None:
    messages, begun = WORDS.messages(WORDS.encode(WORDS.render(CONVERSATION, [TOOL])))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Be brief.")
    assert json.dumps(TOOL) in messages[0]["content"]
    assert messages[1] == CONVERSATION[1]
    assert messages[2]["tool_calls"][0]["function"] == CALL["function"]
    assert messages[3]["content"].count("<tool_response>") == 2
    assert not len(begun)


def test_begun_turn_is_parsed_too() -> None:
    begun_answer = WORDS.encode("Let me")
    prompt = np.concatenate([WORDS.encode(WORDS.render(CONVERSATION[:2], [])), begun_answer])
    messages, begun = WORDS.messages(prompt)
    assert len(messages) == 2
    assert np.array_equal(begun, begun_answer)


@pytest.mark.parametrize("prompt", [[], [5, 9, 11]])
def test_prompt_without_messages(prompt: list[int]) -> None:
    assert WORDS.messages(token_ids(prompt))[0] == []


@pytest.mark.parametrize("reasoning", ["", "hm\nwell"])
@pytest.mark.parametrize("content", ["", "Let me see."])
@pytest.mark.parametrize("n_calls", [0, 1, 2])
def test_template_renders_turns_as_they_are_sampled(reasoning: str, content: str, n_calls: int) -> None:
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": [CALL] * n_calls}
    sampled = written(content, [("bash", CALL["function"]["arguments"])] * n_calls, reasoning)  # type: ignore[index]
    before = WORDS.render(CONVERSATION[:2], [])
    assert WORDS.render([*CONVERSATION[:2], message], [], generation_prompt=False) == f"{before}{sampled}<|im_end|>\n"


@given(st.lists(st.integers(0, WORDS.size - 1)))
def test_ids_are_decoded_by_their_bytes(ids: list[int]) -> None:
    whole = b"".join(WORDS.bytes_of[id_] for id_ in ids)
    assert WORDS.decode(token_ids(ids), special=True) == whole.decode("utf-8", "replace")
