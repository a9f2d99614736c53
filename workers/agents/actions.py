"""Tool calls as actions: the tools' schemas for the policy, argument validation, and truncation of results.

An error in a call is returned to the policy as a tool result that says what to change: a bad call is data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from farm.errors import LimitReached, ToolError
from farm.records.rollout import Outcome
from farm.records.trajectory import Message, ModelCall, ToolCall
from workers.plugins.interfaces import AgentContext, Tool
from workers.policy.recording import Stopwatch, as_applied, model_call

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionToolParam

_MAX_SHOWN_CHARS = 200
_DROPPED = "\n[... {} characters dropped ...]\n"


class InvalidCall(ToolError):
    """A call of an unknown tool, or with invalid arguments; nothing was run."""


def schemas(tools: Mapping[str, Tool]) -> list[ChatCompletionToolParam]:
    """Return the tools in the form of the OpenAI API, in the same order."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": tool.description,
                "parameters": tool.arguments.model_json_schema(),
            },
        }
        for name, tool in tools.items()
    ]


def tool_calls(message: Message) -> list[ToolCall]:
    """Return the calls of an assistant message; a missing name or argument becomes empty, which `parse` refuses."""
    calls = []
    for index, call in enumerate(message.get("tool_calls") or []):
        function = call.get("function") or {}
        calls.append(
            ToolCall(call.get("id") or f"call_{index}", function.get("name") or "", function.get("arguments") or "")
        )
    return calls


def parse(call: ToolCall, tools: Mapping[str, Tool]) -> tuple[Tool, BaseModel]:
    """Return the tool and its validated arguments. Raises InvalidCall, worded for the model."""
    tool = tools.get(call.name)
    if tool is None:
        raise InvalidCall(f"{_nameless(call)} Call one of: {', '.join(tools) or 'none; answer in text'}.")
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidCall(_unreadable(call, error)) from None
    try:
        return tool, tool.arguments.model_validate(arguments)
    except ValidationError as error:
        faults = [(".".join(map(str, each["loc"])) or "arguments", each["msg"]) for each in error.errors()]
        complaints = "; ".join(f"{location}: {message}" for location, message in faults)
        raise InvalidCall(f"The arguments of {call.name} do not fit: {complaints}.") from None


def _nameless(call: ToolCall) -> str:
    if call.name:
        return f"There is no tool {cut(call.name, _MAX_SHOWN_CHARS)!r}."
    shown = f": {cut(call.arguments, _MAX_SHOWN_CHARS)!r}" if call.arguments else ""
    return f"A tool call could not be read{shown}. Write it whole, in the format you were given."


def _unreadable(call: ToolCall, error: Exception) -> str:
    """Return the message for unreadable arguments; a truncated or garbled call has its raw text as arguments."""
    if call.arguments.lstrip().startswith(("{", "[")):
        return (
            f"The arguments of {call.name} are not JSON ({error}). Send one JSON object; escape quotes and line breaks."
        )
    shown = repr(cut(call.arguments, _MAX_SHOWN_CHARS))
    return (
        f"The call of {call.name} could not be read, its arguments are not JSON or it is not whole: {shown}. "
        "Write it again, in the format you were given."
    )


def cut(text: str, max_chars: int) -> str:
    """Return at most `max_chars` characters: head and tail, with the number of characters dropped between them."""
    if len(text) <= max_chars:
        return text
    room = max_chars - len(_DROPPED.format(len(text)))
    if room <= 0:
        return text[:max_chars]
    head = room - room // 2
    tail = room // 2
    return text[:head] + _DROPPED.format(len(text) - room) + text[len(text) - tail :]


async def next_call(
    context: AgentContext,
    index: int,
    history: list[Message],
    added: Sequence[Message],
    tools: Sequence[ChatCompletionToolParam],
    n_sampled: int,
) -> ModelCall:
    """Let the policy answer `history`, to which its answer is appended; return the record of the call.

    `added` are the messages since the last call, `n_sampled` the tokens so far. Raises LimitReached if none is left.
    """
    left = context.limits.max_tokens - n_sampled
    if left <= 0:
        raise LimitReached(Outcome.MAX_TOKENS, f"{n_sampled} tokens are sampled")
    sampling, watch = context.sampling, Stopwatch()
    max_tokens = min(left, sampling.max_tokens or left)
    completion = await context.policy.complete(list(history), tools, sampling, max_tokens)
    history.append(completion.response)
    return model_call(index, added, completion, watch, as_applied(sampling, max_tokens), tools)


def ended_by(last: ModelCall, whole: Outcome) -> Outcome:
    """Return the outcome of a rollout that ends with this call: `whole`, unless a limit cut it short.

    An engine that stops before the allowed `max_tokens` has run out of context.
    """
    if last.finish_reason != "length":
        return whole
    return Outcome.CONTEXT_FULL if last.n_response_tokens < last.sampling["max_tokens"] else Outcome.MAX_TOKENS
