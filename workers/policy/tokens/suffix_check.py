"""The text after a held turn, from an outline of the conversation before it; verifies that the outline suffices.

Templates that count their rounds give another suffix if rounds are omitted. So a template's first outline that omits
some, and later one that omits four times as many, is compared with one that keeps all. After a difference all rounds
are kept, and the cost of a prompt grows with the number of messages before it, though not with their length.
"""

from __future__ import annotations

from collections.abc import Sequence

from farm.records.trajectory import Message
from workers.policy.tokens.conversation_skeleton import shortened, shows_tools
from workers.policy.tokens.conversation_tree import MessageNode
from workers.policy.tokens.template import TemplateError
from workers.policy.tokens.turn_suffix import Tools, TurnSuffix, TurnSuffixes


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
