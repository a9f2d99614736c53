"""The parts of a rollout kept for scoring: files with bytes and modes, the layer, an early score; and their scores.

In the store all of it is JSON, with bytes in base64. The rewards of rows and turns are stored with their score, so that
rescoring replaces them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from farm.records.trajectory import ModelCall, Segment

MAX_TREE_BYTES = 16_000_000
MAX_TREE_FILES = 10_000


@dataclass(frozen=True, slots=True)
class Score:
    """A reward with its explanation; `details` is JSON.

    `rewards` are several scores by name; the batch selects the one that counts (`BatchRequest.reward`). By default it
    is `value`, else `rewards["reward"]`, else the only one.

    `call_rewards` and `row_rewards` are rewards of single model calls (turns) and of single training rows, by their
    index in `Submission.calls`: for evaluators of a handler with `scores_calls = True`.
    """

    value: float = math.nan
    details: dict[str, Any] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    call_rewards: dict[int, float] = field(default_factory=dict)
    row_rewards: dict[int, float] = field(default_factory=dict)


class SubmittedCall(BaseModel):
    """A model call as passed to an evaluator.

    `row` is the training row in which it was sampled, `position` the index of its last token in the row's response.
    Both are None for a call that does not train.
    """

    model_config = ConfigDict(frozen=True)

    index: int
    labels: dict[str, str] = {}
    messages: list[dict[str, Any]] = []
    """The new messages of its conversation."""
    response: dict[str, Any]
    row: int | None = None
    position: int | None = None


class RowRewards(BaseModel):
    """The rewards of rows, by index, and of turns: row, index in its response, reward."""

    model_config = ConfigDict(frozen=True)

    rows: dict[int, float] = {}
    turns: tuple[tuple[int, int, float], ...] = ()

    def applied(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return the rows with these rewards; a turn's replaces the reward from an environment for that turn."""
        return [self._applied(index, segment) for index, segment in enumerate(segments)]

    def _applied(self, index: int, segment: Segment) -> Segment:
        turns = dict(segment.turn_rewards) | {position: reward for row, position, reward in self.turns if row == index}
        return replace(segment, reward=self.rows.get(index), turn_rewards=tuple(sorted(turns.items())))


def submitted_calls(calls: Sequence[ModelCall], rows: Sequence[Segment]) -> tuple[SubmittedCall, ...]:
    """Return the calls of a rollout with their positions in the training rows, for any row builder."""
    submitted: list[SubmittedCall] = []
    taken: set[tuple[int, int]] = set()
    for call in calls:
        positions = list(_positions(call, rows))
        # calls with the same prompt and the same samples are distinguished by their order
        row, position = next(
            (each for each in positions if each not in taken), positions[0] if positions else (None, None)
        )
        if row is not None and position is not None:
            taken.add((row, position))
        shown = SubmittedCall(
            index=call.index,
            labels=call.labels,
            messages=call.messages,
            response=call.response,
            row=row,
            position=position,
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
    rewarded = [(known[index], reward) for index, reward in sorted(of_calls.items())]
    turns = tuple(
        (call.row, call.position, reward)
        for call, reward in rewarded
        if call.row is not None and call.position is not None
    )
    return RowRewards(rows=dict(of_rows), turns=turns) if of_calls or of_rows else None


def _positions(call: ModelCall, rows: Sequence[Segment]) -> Iterator[tuple[int, int]]:
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


class SubmittedFile(BaseModel):
    """A file, a folder or a symbolic link left by the policy, under its path in `Submission.tree`.

    `data` are the bytes of a file, `target` is the unchanged text of a link; a folder has neither.
    """

    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    kind: Literal["file", "folder", "link"] = "file"
    data: bytes = b""
    mode: Annotated[int, Field(ge=0, le=0o7777)] = 0o644
    target: str = ""


class KeptLayer(BaseModel):
    """The writable layer left by the policy: where it is kept, and whether scoring can be repeated with it.

    On the rollout's node it is in the folder of layers as `name` until it is scored. `stored`: it is also an artefact
    of the rollout's `attempt`, available to any node at any time; else it exceeded FARM_LAYER_MB. `n_restored` paths
    were left out because the image has them; `restored` summarizes them, where a final `/` means everything in a
    folder.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    attempt: int
    stored: bool
    restored: tuple[str, ...] = ()
    n_restored: int = 0


class EarlyScore(BaseModel):
    """A score of the running sandbox; see `Handler.scores_running` in `workers/plugins/handler.py`."""

    model_config = ConfigDict(frozen=True)

    value: float
    details: dict[str, Any] = {}
    rewards: dict[str, float] = {}
    evaluator: str


class Submission(BaseModel):
    """The scored part of a rollout; kept in the store, so that scoring can be repeated without another run.

    The farm sets the last five fields, no handler does (`workers/plugins/handler.py`).
    """

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    answer: str | None = None
    files: dict[str, str] = {}
    """Path to text, as the policy left them."""
    tree: dict[str, SubmittedFile] = {}
    """Path to bytes with modes, folders, links; at most MAX_TREE_FILES of MAX_TREE_BYTES in all."""
    layer: KeptLayer | None = None
    steps: list[dict[str, Any]] = []
    """The records of the steps before the last one, in order."""
    early_score: EarlyScore | None = None
    rewards: tuple[float, ...] | None = None
    """Rewards of an environment's steps, recorded by its agent. None without an environment."""
    calls: tuple[SubmittedCall, ...] = ()
    """The model calls, for handlers with `scores_calls = True`."""
