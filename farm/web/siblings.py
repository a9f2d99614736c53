"""The samples of one instance side by side: their rewards, and where they diverge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farm.records.rollout import Rollout
from farm.records.trajectory import ModelCall, Segment
from farm.web.transcript import tool_calls
from farm.web.untrusted_text import reasoning_of, text_of


@dataclass(frozen=True, slots=True)
class SiblingTurn:
    """One turn of a sample: the policy's message. `parts` is True for the first that differs from the reference's."""

    index: int
    text: str
    parts: bool


@dataclass(frozen=True, slots=True)
class Sibling:
    """One sample. Its first `common_tokens` tokens equal those of the reference; None without tokens."""

    rollout: Rollout
    turns: Sequence[SiblingTurn]
    common_tokens: int | None
    parts_at_turn: int | None


def siblings(
    rollouts: Sequence[Rollout], calls: Sequence[Sequence[ModelCall]], rows: Sequence[Sequence[Segment]]
) -> list[Sibling]:
    """Return the samples of a group; the reference is the first one with a model call."""
    reference = next((at for at, made in enumerate(calls) if made), None)
    samples = []
    for at, rollout in enumerate(rollouts):
        turns = [answer_of(call) for call in calls[at]]
        first = None
        if reference is not None and at != reference:
            others = [answer_of(call) for call in calls[reference]]
            first = next((n for n in range(len(turns)) if n >= len(others) or turns[n] != others[n]), None)
            if first is None and len(turns) < len(others) and turns:
                first = len(turns) - 1
        common = None
        if reference is not None and rows[at] and rows[reference]:
            common = _common(rows[at][0], rows[reference][0])
        shown = [SiblingTurn(n, text, n == first) for n, text in enumerate(turns)]
        samples.append(Sibling(rollout, shown, common, first))
    return samples


def answer_of(call: ModelCall) -> str:
    """Return the policy's answer in a model call, in a few lines: thoughts, text, tool calls."""
    message = call.response
    lines = [f"({reasoning})" for reasoning in [reasoning_of(message).strip()] if reasoning]
    lines += [text for text in [text_of(message.get("content")).strip()] if text]
    for each in tool_calls(message):
        arguments = ", ".join(f"{name}={value}" if name else value for name, value in each.arguments)
        lines.append(f"→ {each.name}({arguments})")
    return "\n".join(lines)


def _common(mine: Segment, other: Segment) -> int:
    """Return the number of tokens that two responses have in common from their beginning."""
    if len(mine.prompt_ids) != len(other.prompt_ids) or not np.array_equal(mine.prompt_ids, other.prompt_ids):
        return 0
    n = min(len(mine.response_ids), len(other.response_ids))
    differ = np.flatnonzero(mine.response_ids[:n] != other.response_ids[:n])
    return int(differ[0]) if len(differ) else n
