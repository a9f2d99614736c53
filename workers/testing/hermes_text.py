"""Hermes tool calls, `<tool_call>` JSON `</tool_call>`: written and parsed by the scripted engine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from farm.records.trajectory import Message

CALL, CALL_END = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<think>", "</think>"
_CALLS = re.compile(f"{CALL}(.*?){CALL_END}|{CALL}(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class HermesCall:
    """A sampled tool call. `arguments` is JSON text; an invalid call has its raw text there, and no name."""

    name: str
    arguments: str


def written(content: str, calls: Sequence[tuple[str, str]], reasoning: str = "") -> str:
    """Return an assistant turn as the chat template renders it; arguments are text, JSON or not."""
    text = f"{THINK}\n{reasoning}\n{THINK_END}\n\n{content}" if reasoning else content
    for index, (name, arguments) in enumerate(calls):
        gap = "\n" if content or index else ""
        text += f'{gap}{CALL}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{CALL_END}'
    return text


def reasoned(text: str) -> tuple[str, str]:
    """Split a text into reasoning and the rest, whitespace included. Unclosed reasoning takes the whole text."""
    if not text.startswith(THINK):
        return "", text
    reasoning, _, rest = text.removeprefix(THINK).partition(THINK_END)
    return reasoning, rest


def loose_calls(text: str) -> tuple[str, tuple[HermesCall, ...]]:
    """Return the text before the first call, and all calls, including broken ones."""
    return text.partition(CALL)[0], tuple(_call(whole or cut) for whole, cut in _CALLS.findall(text))


def _call(body: str) -> HermesCall:
    try:
        fields = json.loads(body)
        return HermesCall(str(fields["name"]), json.dumps(fields["arguments"], ensure_ascii=False))
    except (ValueError, KeyError, TypeError):
        return HermesCall("", body.strip())


def strict_calls(text: str) -> tuple[str, tuple[HermesCall, ...]]:
    """Parse like vLLM: a single broken call makes the whole turn text."""
    content, calls = loose_calls(text)
    return (text, ()) if any(not call.name for call in calls) else (content, calls)


def message_of(text: str) -> Message:
    """Return an assistant turn's text as a chat message, including broken calls."""
    _, rest = reasoned(text)
    content, calls = loose_calls(rest)
    return {"role": "assistant", "content": content, "tool_calls": [tool_call(call, "") for call in calls]}


def tool_call(call: HermesCall, call_id: str) -> dict[str, Any]:
    """Return the call in the form of the OpenAI API."""
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def listed_tools(system: str) -> tuple[dict[str, Any], ...]:
    """Return the functions that a system turn lists as JSON lines between tags."""
    lines = system.partition("<tools>")[2].partition("</tools>")[0].strip().splitlines()
    tools = []
    for line in lines:
        try:
            tool = json.loads(line)
            tools.append(tool.get("function", tool))
        except (ValueError, AttributeError):
            continue
    return tuple(tool for tool in tools if isinstance(tool.get("name"), str))
