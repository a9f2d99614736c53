"""Rewards of single training rows and turns, if an evaluator returns them: the calls it gets, and the stored form.

They are stored with their score, so that rescoring replaces them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from farm.records.trajectory import ModelCall, Segment


class SubmittedCall(BaseModel):
    """A model call as passed to an evaluator.

    `row` is the training row in which it was sampled, `place` the index of its last token in the row's response; None
    for a call that does not train.
    """

    model_config = ConfigDict(frozen=True)

    index: int
    labels: dict[str, str] = {}
    messages: list[dict[str, Any]] = []
    """The new messages of its conversation."""
    response: dict[str, Any]
    row: int | None = None
    place: int | None = None


class RowRewards(BaseModel):
    """The rewards of rows, by index, and of turns: row, index in its response, reward."""

    model_config = ConfigDict(frozen=True)

    rows: dict[int, float] = {}
    turns: tuple[tuple[int, int, float], ...] = ()

    def applied(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return the rows with these rewards; a turn's replaces the reward from an environment for that turn."""
        return [self._applied(index, segment) for index, segment in enumerate(segments)]

    def _applied(self, index: int, segment: Segment) -> Segment:
        turns = dict(segment.turn_rewards) | {place: reward for row, place, reward in self.turns if row == index}
        return replace(segment, reward=self.rows.get(index), turn_rewards=tuple(sorted(turns.items())))


def submitted_calls(calls: Sequence[ModelCall], rows: Sequence[Segment]) -> tuple[SubmittedCall, ...]:
    """Return the calls of a rollout with their positions in the training rows, for any row builder."""
    submitted: list[SubmittedCall] = []
    taken: set[tuple[int, int]] = set()
    for call in calls:
        places = list(_places(call, rows))
        # calls with the same prompt and the same samples are distinguished by their order
        row, place = next((each for each in places if each not in taken), places[0] if places else (None, None))
        if row is not None and place is not None:
            taken.add((row, place))
        shown = SubmittedCall(
            index=call.index,
            labels=call.labels,
            messages=call.messages,
            response=call.response,
            row=row,
            place=place,
        )
        submitted.append(shown)
    return tuple(submitted)


def row_rewards(
    calls: Sequence[SubmittedCall], of_calls: Mapping[int, float], of_rows: Mapping[int, float]
) -> RowRewards | None:
    """Return the rewards from an evaluator; None if it returned none. Raises ValueError for unknown calls or rows."""
    known = {call.index: call for call in calls}
    rows = {call.row for call in calls if call.row is not None}
    if unknown := [f"call {index}" for index in of_calls if index not in known]:
        raise ValueError(f"it has no {', '.join(unknown[:5])}")
    if unknown := [f"row {index}" for index in of_rows if index not in rows]:
        raise ValueError(f"it has no {', '.join(unknown[:5])}")
    placed = [(known[index], reward) for index, reward in sorted(of_calls.items())]
    turns = tuple(
        (call.row, call.place, reward) for call, reward in placed if call.row is not None and call.place is not None
    )
    return RowRewards(rows=dict(of_rows), turns=turns) if of_calls or of_rows else None


def _places(call: ModelCall, rows: Sequence[Segment]) -> Iterator[tuple[int, int]]:
    """Yield each row that this call may have sampled, and the index of the call's last token in its response."""
    if not call.token_exact:
        return
    assert call.prompt_ids is not None
    assert call.response_ids is not None
    for index, row in enumerate(rows):
        start = len(call.prompt_ids) - len(row.prompt_ids)
        stretch = slice(start, start + len(call.response_ids))
        if (
            start >= 0
            and len(call.response_ids)
            and np.array_equal(row.response_ids[stretch], call.response_ids)
            and row.response_mask[stretch].all()
            # last, because it is slow for long rows
            and np.array_equal(np.concatenate([row.prompt_ids, row.response_ids[:start]]), call.prompt_ids)
        ):
            yield index, stretch.stop - 1
