"""A rollout's conversation in this protocol: messages with their token ids.

The ids of all messages, concatenated, are the ids that the policy saw and sampled. Ids between two answers are all at
the first message between them, as the chat template is not run again to attribute them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.api.protocol_parts.message_texts import reasoning_and_text
from farm.records.trajectory import Message, ModelCall, ToolSchema, calls_of_segments, tools_by_call

WireMessage = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """`tools` are those of the first prompt, in the form of the chat API.

    `ends_properly` is false if the conversation was ended at an answer with unclosed reasoning.
    """

    messages: list[WireMessage]
    tools: list[ToolSchema]
    ends_properly: bool


def conversation(calls: Sequence[ModelCall], with_tokens: bool, end_thinking: bool) -> Conversation:
    """Return the conversation up to the policy's last answer; of several rows the one with the most sampled tokens.

    With `end_thinking`, an answer that begins to reason and does not stop is closed, with its calls as text, and is the
    last one.
    """
    rows = calls_of_segments(calls)
    chosen = max(rows, key=_n_sampled) if rows else tuple(calls)
    tools = tools_by_call(calls)[chosen[0].index] if chosen else []
    result: list[WireMessage] = []
    n_seen = 0
    between: list[Message] = []
    for call in chosen:
        between += call.messages
        result += _put(between, call, n_seen, with_tokens)
        answer = _answer(call, with_tokens)
        result.append(answer)
        if end_thinking and "<think>" in answer["content"] and "</think>" not in answer["content"]:
            _close(answer)
            return Conversation(result, tools, False)
        n_seen = call.n_prompt_tokens + call.n_response_tokens if call.token_exact else 0
        between = list(call.observations)
    return Conversation(result, tools, True)


def _n_sampled(row: Sequence[ModelCall]) -> int:
    return sum(call.n_response_tokens for call in row)


def _put(between: Sequence[Message], call: ModelCall, n_seen: int, with_tokens: bool) -> list[WireMessage]:
    """Return the messages between two answers; the first of them has the ids of them all."""
    result = [_plain(message) for message in between]
    if with_tokens and call.token_exact:
        assert call.prompt_ids is not None
        ids = call.prompt_ids[n_seen:].tolist()
        for index, message in enumerate(result):
            message |= {"token_ids": [] if index else ids, "input_ids": None, "output_ids": None, "logprobs": None}
    return result


def _answer(call: ModelCall, with_tokens: bool) -> WireMessage:
    message = _plain(call.response)
    message["role"] = "assistant"
    if with_tokens and call.token_exact:
        assert call.prompt_ids is not None
        assert call.response_ids is not None
        assert call.response_logprobs is not None
        ids = call.response_ids.tolist()
        message |= {"token_ids": ids, "input_ids": call.prompt_ids.tolist(), "output_ids": ids}
        message["logprobs"] = call.response_logprobs.tolist()
    return message


def _plain(message: Mapping[str, Any]) -> WireMessage:
    """Return a message in the form for its trainers' templates: its text, and only the function of a call."""
    reasoning, text = reasoning_and_text(message)
    result: WireMessage = {"role": str(message.get("role", "user"))}
    result["content"] = f"<think>\n{reasoning}\n</think>\n\n{text}" if reasoning else text
    if calls := message.get("tool_calls"):
        result["tool_calls"] = [call.get("function", {}) for call in calls]
    return result


def _close(answer: WireMessage) -> None:
    """Close the reasoning of an answer, with its calls in the text."""
    calls = [
        f'\n<tool_call>\n{{"name": "{call.get("name")}", "arguments": {call.get("arguments")}}}\n</tool_call>'
        for call in answer.pop("tool_calls", ())
    ]
    answer["content"] = f"{answer['content']}\n{''.join(calls)}</think>"
