"""A byte-level tokenizer made in code, with a ChatML-like rendering whose turns extend each other exactly.

Ids 0 to 255 are bytes, then come the special tokens. The prompt and response ids of a turn are the beginning of the
next turn's prompt ids, which is what a trainer hopes of a real chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from farm.trajectory import Message

START = 256
END = 257
VOCABULARY_SIZE = 258


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(ids: Sequence[int]) -> str:
    """The text of the bytes; special tokens are left out."""
    return bytes(id_ for id_ in ids if id_ < START).decode("utf-8", "replace")


def prompt_ids(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
    """All messages, and the beginning of the assistant's next."""
    ids: list[int] = []
    if tools:
        ids += _message("tools", json.dumps(tools, sort_keys=True))
    for message in messages:
        ids += _message(message["role"], body(message))
    return ids + _head("assistant")


def response_ids(message: Message, max_tokens: int) -> tuple[list[int], bool]:
    """The ids that were sampled, END included, and whether they are all: what is cut ends with a whole character."""
    ids = [*encode(body(message)), END]
    if len(ids) <= max_tokens:
        return ids, True
    cut = ids[:max_tokens]
    # A byte 10xxxxxx goes on with the character before it.
    while len(cut) > 1 and ids[len(cut)] & 0xC0 == 0x80 and ids[len(cut)] < START:
        cut.pop()
    return cut, False


def body(message: Message) -> str:
    """A message as text: the same whether it was just sampled or came back in the history."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content)
    for call in message.get("tool_calls") or []:
        function = call["function"]
        text += f"\n<tool_call>{json.dumps([function['name'], function['arguments']], ensure_ascii=False)}</tool_call>"
    return text


def _head(role: str) -> list[int]:
    return [START, *encode(f"{role}\n")]


def _message(role: str, text: str) -> list[int]:
    return [*_head(role), *encode(text), END, *encode("\n")]
