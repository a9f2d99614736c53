"""A conversation in outline: everything by which a template distinguishes messages, without the bulk of their text.

The text that a template puts after a turn depends on the whole conversation, but its cost must not grow with it. So old
messages are shortened to the head and tail of their text, and of many rounds of one kind (an assistant turn and the
answers to it) only the first and the last are kept: templates treat a message by its role, by its kinds of content and
by its position relative to the last user message or the last turn, and an outline keeps all of that.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from farm.records.trajectory import Message
from workers.policy.tokens.messages import reasoning, text_of

_HEAD = _TAIL = 24
_THOUGHT = "</think>"

MARK = secrets.token_hex(6)
"""A random mark to search for in renders: no text for a model can contain it by chance."""


@dataclass(frozen=True, slots=True)
class Round:
    """An assistant turn and the answers to it; the first round of a conversation has all messages before any turn."""

    kind: tuple[Hashable, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class ConversationSkeleton:
    """The kept rounds. Grows one message at a time, to at most twice as many rounds as there are kinds."""

    rounds: tuple[Round, ...] = (Round((), ()),)
    n_dropped: int = 0

    def then(self, message: Message) -> ConversationSkeleton:
        """Return the skeleton with one more message, prepared for the template."""
        short = shortened(message)
        if message.get("role") != "assistant":
            last = self.rounds[-1]
            kind = last.kind if last.kind[-1:] == (_kind(short),) else (*last.kind, _kind(short))
            return ConversationSkeleton((*self.rounds[:-1], Round(kind, (*last.messages, short))), self.n_dropped)
        kept = _without_middle(self.rounds)
        return ConversationSkeleton(
            (*kept, Round((_kind(short),), (short,))), self.n_dropped + len(self.rounds) - len(kept)
        )

    @property
    def n_rounds(self) -> int:
        return len(self.rounds) + self.n_dropped

    def messages(self) -> list[Message]:
        return [message for part in self.rounds for message in part.messages]


def shortened(message: Message) -> Message:
    """Return the message with shortened texts; a template treats it alike."""
    return _changed(message, lambda _, text: _cut(text))


def marked(message: Message) -> Message:
    """Return a shortened turn in which every text that a render must show ends with its own mark."""
    turn = _changed(message, lambda what, text: _cut(text) + _mark(what))
    for number, call in enumerate(turn.get("tool_calls") or ()):
        function = call["function"]
        if not _has_text(function["arguments"]):
            function["arguments"] = {**function["arguments"], "mark": _mark(f"call{number}")}
    return turn


def marks(message: Message) -> dict[str, str]:
    """Return the marks of a turn that a render must show: readable name to mark."""
    by_name = {"the reasoning": _mark("thought")} if reasoning(message) else {}
    _, thought, after = _parted(text_of(message.get("content")) or "")
    if thought:
        by_name["the reasoning in the text"] = _mark("inner")
    if after.strip():
        by_name["the text"] = _mark("text")
    n_calls = len(message.get("tool_calls") or ())
    return by_name | {f"tool call {number + 1}": _mark(f"call{number}") for number in range(n_calls)}


def outlined_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return at most the first two tools, without descriptions and schemas. They contain a mark: see `shows_tools`."""
    empty = {"type": "object", "properties": {}, "required": []}
    names = [str((tool.get("function") or tool).get("name", "")) for tool in tools[:2]]
    return [
        {"type": "function", "function": {"name": name, "description": _mark("tool"), "parameters": empty}}
        for name in names
    ]


def shows_tools(text: str) -> bool:
    """Return whether a text contains outlined tools, and so differs from the text with the real ones."""
    return _mark("tool") in text


def _without_middle(rounds: tuple[Round, ...]) -> tuple[Round, ...]:
    """Return the rounds; of three rounds of the last one's kind, the middle one is dropped."""
    kind = rounds[-1].kind
    alike = [number for number in range(1, len(rounds)) if rounds[number].kind == kind]
    return rounds if len(alike) < 3 else rounds[: alike[1]] + rounds[alike[1] + 1 :]


def _kind(message: Message) -> Hashable:
    content = message.get("content")
    text = text_of(content) or ""
    return (
        message.get("role"),
        type(content).__name__,
        bool(text.strip()),
        _THOUGHT in text,
        bool(reasoning(message)),
        bool(message.get("tool_calls")),
    )


def _changed(message: Message, change: Callable[[str, str], str]) -> Message:
    """Return the message with all its texts changed; `change` gets a text's label and the text."""
    short = dict(message)
    short["content"] = _content(message.get("content"), change)
    for key in ("reasoning", "reasoning_content"):
        if key in message:
            short[key] = change("thought", message[key])
    if calls := message.get("tool_calls"):
        short["tool_calls"] = []
        for number, call in enumerate(calls):
            arguments = _inner(call["function"]["arguments"], partial(change, f"call{number}"))
            short["tool_calls"].append({**call, "function": {**call["function"], "arguments": arguments}})
    return short


def _mark(what: str) -> str:
    return f"{what}{MARK}"


def _has_text(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_text, value.values()))
    return any(map(_has_text, value)) if isinstance(value, list) else isinstance(value, str)


def _inner(value: Any, change: Callable[[str], str]) -> Any:
    """Return arguments with their texts changed, and lists cut to two elements."""
    if isinstance(value, dict):
        return {key: _inner(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_inner(inner, change) for inner in value[:2]]
    return change(value) if isinstance(value, str) else value


def _content(content: Any, change: Callable[[str, str], str]) -> Any:
    if isinstance(content, str):
        return _changed_text(content, change)
    if not isinstance(content, list):
        return content
    return [
        {**part, "text": _changed_text(part["text"], change)}
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else part
        for part in content
    ]


def _changed_text(text: str, change: Callable[[str, str], str]) -> str:
    """Return the changed text; reasoning in it is changed separately, as templates cut it out."""
    before, thought, after = _parted(text)
    shown = change("text", after) if after.strip() else after[:_HEAD]
    return f"{change('inner', before)}{thought}{shown}" if thought else shown


def _parted(text: str) -> tuple[str, str, str]:
    """Return the text before the reasoning's end tag, the tag, and the text after it; without a tag all is after it."""
    before, thought, after = text.partition(_THOUGHT)
    return (before, thought, after) if thought else ("", "", text)


def _cut(text: str) -> str:
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]}…{text[-_TAIL:]}"
