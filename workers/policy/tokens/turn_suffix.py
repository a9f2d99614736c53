"""The text that a chat template puts after a turn: the end of turn, and all text up to the next turn.

It is found by rendering the conversation in outline with that turn marked, and searching for the end of turn after the
marks. Rendering also shows whether the template still renders earlier turns as it did when they were prompted; if not,
no text after the held ids could have the same effect.

Templates that count their rounds give another suffix if rounds are omitted. So a template's first outline that omits
some, and later one that omits four times as many, is compared with one that keeps all. After a difference all rounds
are kept, and the cost of a prompt grows with the number of messages before it, though not with their length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary

from farm.records.trajectory import Message
from workers.policy.tokens.conversation_skeleton import marks, shortened, shows_tools
from workers.policy.tokens.conversation_tree import MessageNode
from workers.policy.tokens.template import ChatTemplate, TemplateError, clock
from workers.policy.tokens.tokenizer import ModelText

Tools = Sequence[Mapping[str, Any]]

_CALL_ID = "probe0001"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
_learned: WeakKeyDictionary[ChatTemplate, dict[str, TemplateTraits]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class TurnSuffix:
    """The text to put after a turn. It begins with `end`, the template's end of turn, if that is a special token.

    `opens`: this token is the header of the next message rather than the end of the last, as with GLM models; then no
    other end of turn can replace it. `rewritten` describes the template's changes of the earlier conversation, empty if
    none; `found` is False if the end of the turn was not found, and then there is no text.
    """

    text: str = ""
    end: str = ""
    rewritten: str = ""
    found: bool = True
    opens: bool = False


@dataclass(slots=True)
class TemplateTraits:
    """The traits of a template under given variables, determined once per process.

    `ends` are the special tokens that may close a turn, with tool calls (True) or without; empty if plain text closes
    it. `opens`: they are headers of the next message. `counts_rounds`: the suffix of a turn depends on the number of
    rounds before it; known for up to `n_rounds` of them.
    """

    ends: dict[bool, tuple[str, ...]] = field(default_factory=dict)
    opens: bool = False
    counts_rounds: bool = False
    n_rounds: int = 0


class TurnSuffixes:
    """The suffixes of one model's template under fixed variables, at one time."""

    def __init__(self, model: ModelText, variables: Mapping[str, Any], instant: datetime) -> None:
        self.model = model
        self.learned = _learned.setdefault(model.template, {}).setdefault(
            repr(sorted(variables.items())), TemplateTraits()
        )
        self.kwargs = {"strftime_now": clock(instant), **variables}

    def render(self, messages: Sequence[Message], tools: Tools) -> str:
        """Return the text of prepared messages, with the generation prompt."""
        return self.model.template.render_prepared(messages, tools, generation_prompt=True, **self.kwargs)

    def after(self, earlier: Sequence[Message], turn: Message, new: Sequence[Message], tools: Tools) -> TurnSuffix:
        """Return the suffix of `turn`, a marked turn sampled after `earlier`, when `new` follows it; all prepared."""
        before = self.render(earlier, tools)
        after = self.render([*earlier, turn, *new], tools)
        kept = after.startswith(before)
        ends_at, missing = _turn_end(after, turn, len(before) if kept else 0)
        rewritten = self._changes(before, after, earlier, tools) if not kept else missing and f"{missing} is dropped"
        if ends_at < 0:
            return TurnSuffix(rewritten=rewritten, found=False)
        turn_suffix = self._cut(after, ends_at, bool(turn.get("tool_calls")))
        return TurnSuffix(turn_suffix.text, turn_suffix.end, rewritten, turn_suffix.found, self.learned.opens)

    def _cut(self, after: str, ends_at: int, called: bool) -> TurnSuffix:
        ends = self.ends(called)
        if not ends:
            return TurnSuffix(after[ends_at:])
        matches = [(index, -len(end), end) for end in ends if (index := after.find(end, ends_at)) >= 0]
        if not matches:
            return TurnSuffix(found=False)
        index, _, end = min(matches)
        return TurnSuffix(after[index:], end)

    def _changes(self, before: str, after: str, earlier: Sequence[Message], tools: Tools) -> str:
        try:
            bare = self.model.template.render_prepared(earlier, tools, generation_prompt=False, **self.kwargs)
        except TemplateError:
            bare = before
        if after.startswith(bare):
            return "the generation prompt is not kept in the turn's history"
        return "earlier messages are rendered again"

    def ends(self, called: bool) -> tuple[str, ...]:
        """Return the special tokens that may close a turn (with tool calls or not); none if plain text closes it."""
        if called not in self.learned.ends:
            self.learned.ends[called] = self._learn(called)
        return self.learned.ends[called]

    def _learn(self, called: bool) -> tuple[str, ...]:
        known = tuple(text for text in self.model.tokenizer.end_texts if text)
        between, closings = self._probe_call() if called else self._probe_text()
        if between is None:
            return self.ends(False) if called else known
        if any(end in between for end in known):
            return known
        first = self.model.tokenizer.first_special(between)
        return (first, *known) if first and first in closings else ()

    def _probe_text(self) -> tuple[str | None, str]:
        """Return the text between an answer and the next message, and the text that closes other messages."""
        messages: list[Message] = [{"role": "user", "content": "qAq"}, {"role": "assistant", "content": "qBq"}]
        whole = self._tried([*messages, {"role": "user", "content": "qCq"}], (), True)
        last = self._tried(messages, (), False).partition("qBq")[2]
        between, closings = _between(whole, "qBq", "qCq"), (_between(whole, "qAq", "qBq") or "") + last
        self.learned.opens = between is not None and self._opens(between, closings, whole.partition("qAq")[0])
        return between, closings

    def _opens(self, between: str, closings: str, first: str) -> bool:
        """Return whether the first special token after an answer is a header, which the first message has too."""
        token = self.model.tokenizer.first_special(between)
        return bool(token) and token not in closings and first.endswith(between[between.find(token) :])

    def _probe_call(self) -> tuple[str | None, str]:
        """Like `_probe_text`, for a turn with a tool call and its result."""
        function = {"name": "probe", "arguments": {"value": "qBq"}}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        messages: list[Message] = [
            {"role": "user", "content": "qAq"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "qCq", "name": "probe", "tool_call_id": _CALL_ID},
        ]
        whole = self._tried(messages, (_PROBE_TOOL,), True)
        return _between(whole, "qBq", "qCq"), _between(whole, "qAq", "qBq") or ""

    def _tried(self, messages: Sequence[Message], tools: Tools, generation_prompt: bool) -> str:
        try:
            return self.model.template.render(messages, tools, generation_prompt=generation_prompt, **self.kwargs)
        except TemplateError:
            return ""


def _turn_end(after: str, turn: Message, start: int) -> tuple[int, str]:
    """Return the end of the turn's last mark, -1 if unknown, and the name of a mark missing in the text."""
    ends_at, missing = start or -1, ""
    for what, mark in marks(turn).items():
        index = after.rfind(mark, start)
        missing = missing or (what if index < 0 else "")
        ends_at = max(ends_at, index + len(mark) if index >= 0 else -1)
    return ends_at, missing


def _between(text: str, left: str, right: str) -> str | None:
    _, opening, rest = text.partition(left)
    inner, closing, _ = rest.partition(right)
    return inner if opening and closing else None


def suffix_after(
    framing: TurnSuffixes, turn: MessageNode, new: Sequence[Message], tools: Tools, outlined: Tools
) -> TurnSuffix:
    """Return the suffix of a held turn when `new`, prepared, follows it; `outlined` are the tools in outline."""
    try:
        suffix = _checked(framing, turn, new, outlined)
        # Few templates put tools after a turn; those take the time to render all of them.
        return _checked(framing, turn, new, tools) if shows_tools(suffix.text) else suffix
    # An outline may be refused though the conversation is not; if that is too, its own render says why.
    except TemplateError as error:
        return TurnSuffix(rewritten=f"it cannot be shown in outline ({error})", found=False)


def _checked(framing: TurnSuffixes, turn: MessageNode, new: Sequence[Message], tools: Tools) -> TurnSuffix:
    assert turn.held is not None
    assert turn.parent is not None
    learned, outline, marked = framing.learned, turn.parent.outline, turn.held.turn
    if not learned.counts_rounds:
        suffix = framing.after(outline.messages(), marked, new, tools)
        if not outline.n_dropped or outline.n_rounds < 4 * learned.n_rounds:
            return suffix
    prepare = framing.model.template.prepare
    whole = framing.after([shortened(prepare(message, tools)) for message in turn.parent.path()], marked, new, tools)
    if not learned.counts_rounds:
        learned.n_rounds, learned.counts_rounds = outline.n_rounds, whole != suffix
    return whole
