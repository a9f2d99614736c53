"""A conversation in outline: what a template can tell its messages by, without the bulk of their text.

To learn what a template puts after a turn, it must be shown the whole conversation, but the cost must not grow with it.
So old messages are shortened to the head and tail of their text, and of the many rounds of one kind (an assistant turn
and what answered it) only the first and the last are kept: templates treat a message by its role, by what it holds and
by where it stands to the last user message or to the last turn, and all of that an outline keeps.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from farm.trajectory import Message
from workers.policy.tokens.messages import reasoning, text_of

_HEAD = _TAIL = 24
_THOUGHT = "</think>"

MARK = secrets.token_hex(6)
"""Found in a render, it can only be what was put there: nothing a model reads can know it."""


@dataclass(frozen=True, slots=True)
class Round:
    """An assistant turn and what answered it; the first round of a conversation has what came before any turn."""

    kind: tuple[Hashable, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Outline:
    """The rounds that are kept. Grows by one message at a time, to as many rounds as there are kinds of them, twice."""

    rounds: tuple[Round, ...] = (Round((), ()),)
    n_dropped: int = 0

    def then(self, message: Message) -> Outline:
        """With one message more, given as prepared for the template."""
        short = shortened(message)
        if message.get("role") != "assistant":
            last = self.rounds[-1]
            kind = last.kind if last.kind[-1:] == (_kind(short),) else (*last.kind, _kind(short))
            return Outline((*self.rounds[:-1], Round(kind, (*last.messages, short))), self.n_dropped)
        kept = _without_middle(self.rounds)
        return Outline((*kept, Round((_kind(short),), (short,))), self.n_dropped + len(self.rounds) - len(kept))

    @property
    def n_rounds(self) -> int:
        return len(self.rounds) + self.n_dropped

    def messages(self) -> list[Message]:
        return [message for part in self.rounds for message in part.messages]


def shortened(message: Message) -> Message:
    """The same message to a template's eye."""
    return _changed(message, lambda _, text: _cut(text))


def marked(message: Message) -> Message:
    """A shortened turn, in which everything that must show in a render ends with a mark of its own."""
    turn = _changed(message, lambda what, text: _cut(text) + _mark(what))
    for number, call in enumerate(turn.get("tool_calls") or ()):
        function = call["function"]
        if not _has_text(function["arguments"]):
            function["arguments"] = {**function["arguments"], "mark": _mark(f"call{number}")}
    return turn


def marks(message: Message) -> dict[str, str]:
    """What must show of a marked turn: a name for people, and the text to look for."""
    found = {"the reasoning": _mark("thought")} if reasoning(message) else {}
    _, thought, after = _parted(text_of(message.get("content")) or "")
    if thought:
        found["the reasoning in the text"] = _mark("inner")
    if after.strip():
        found["the text"] = _mark("text")
    n_calls = len(message.get("tool_calls") or ())
    return found | {f"tool call {number + 1}": _mark(f"call{number}") for number in range(n_calls)}


def outlined_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools without what is long about them; of more than two, the first two. They hold a mark: see `shows_tools`."""
    empty = {"type": "object", "properties": {}, "required": []}
    return [
        {"type": "function", "function": {"name": _tool_name(tool), "description": _mark("tool"), "parameters": empty}}
        for tool in tools[:2]
    ]


def shows_tools(text: str) -> bool:
    """Whether a text holds outlined tools, so that it is not what the real ones give."""
    return _mark("tool") in text


def _without_middle(rounds: tuple[Round, ...]) -> tuple[Round, ...]:
    """Without the middle one where three rounds are of the last one's kind."""
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


def _tool_name(tool: Mapping[str, Any]) -> str:
    return str((tool.get("function") or tool).get("name", ""))


def _changed(message: Message, change: Callable[[str, str], str]) -> Message:
    """With all its text changed; `change` is given what the text is, and the text."""
    short = dict(message)
    short["content"] = _content(message.get("content"), change)
    for key in ("reasoning", "reasoning_content"):
        if key in message:
            short[key] = change("thought", message[key])
    if calls := message.get("tool_calls"):
        short["tool_calls"] = [_call(call, partial(change, f"call{number}")) for number, call in enumerate(calls)]
    return short


def _call(call: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _inner(function["arguments"], change)}}


def _mark(what: str) -> str:
    return f"{what}{MARK}"


def _has_text(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_text, value.values()))
    return any(map(_has_text, value)) if isinstance(value, list) else isinstance(value, str)


def _inner(value: Any, change: Callable[[str], str]) -> Any:
    """Arguments with their texts changed, of lists the first two."""
    if isinstance(value, dict):
        return {key: _inner(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_inner(inner, change) for inner in value[:2]]
    return change(value) if isinstance(value, str) else value


def _content(content: Any, change: Callable[[str, str], str]) -> Any:
    if isinstance(content, str):
        return _changed_text(content, change)
    if isinstance(content, list):
        return [_changed_part(part, change) for part in content]
    return content


def _changed_part(part: Any, change: Callable[[str, str], str]) -> Any:
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        return part
    return {**part, "text": _changed_text(part["text"], change)}


def _changed_text(text: str, change: Callable[[str, str], str]) -> str:
    """Reasoning that stands within the text stays apart from it: templates cut it out."""
    before, thought, after = _parted(text)
    shown = change("text", after) if after.strip() else after[:_HEAD]
    return f"{change('inner', before)}{thought}{shown}" if thought else shown


def _parted(text: str) -> tuple[str, str, str]:
    """What stands before the end of reasoning, that end, and what stands after it; all is after it if there is none."""
    before, thought, after = text.partition(_THOUGHT)
    return (before, thought, after) if thought else ("", "", text)


def _cut(text: str) -> str:
    """Its head and its tail."""
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]}…{text[-_TAIL:]}"
