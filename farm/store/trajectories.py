"""Model calls as they happen, and the training rows that follow from them.

A call's prompt repeats the whole conversation, so only the ids beyond those of the longest call it continues are
stored, with that call's number. Storage grows with the conversation, not with its square.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from sqlalchemy import Connection, Table, bindparam, delete, insert, select, update

from farm.store.rollouts import rollouts
from farm.store.tables import ModelCallRow, SegmentRow
from farm.trajectory import ModelCall, Segment, TokenIds

model_calls = cast(Table, ModelCallRow.__table__)
segment_rows = cast(Table, SegmentRow.__table__)


class CallLog:
    """Turns the model calls of one attempt into rows; remembers the ids so far to store only what is new."""

    def __init__(self, rollout_id: str, attempt: int) -> None:
        self.rollout_id = rollout_id
        self.attempt = attempt
        self._ids: dict[int, TokenIds] = {}

    def row(self, call: ModelCall) -> dict[str, Any]:
        """The values of a call's row."""
        prefix, prompt = self._beyond(call)
        if call.prompt_ids is not None and call.response_ids is not None:
            self._ids[call.index] = np.concatenate([call.prompt_ids, call.response_ids])
        return {
            "rollout_id": self.rollout_id,
            "attempt": self.attempt,
            "call_index": call.index,
            "messages": call.messages,
            "response": call.response,
            "observations": call.observations,
            "finish_reason": call.finish_reason,
            "engine": call.engine,
            "policy_version": call.policy_version,
            "sampling": call.sampling,
            "started_at": call.started_at,
            "latency_s": call.latency_s,
            "n_prompt_tokens": call.n_prompt_tokens,
            "n_response_tokens": call.n_response_tokens,
            "prefix_call": prefix,
            "prompt_ids": prompt,
            "response_ids": call.response_ids,
            "response_logprobs": call.response_logprobs,
        }

    def _beyond(self, call: ModelCall) -> tuple[int | None, TokenIds | None]:
        if call.prompt_ids is None:
            return None, None
        for index in sorted(self._ids, reverse=True):
            ids = self._ids[index]
            if index < call.index and np.array_equal(call.prompt_ids[: len(ids)], ids):
                return index, call.prompt_ids[len(ids) :]
        return None, call.prompt_ids


def record_call(connection: Connection, row: dict[str, Any]) -> None:
    """Write a call's row, or its observations if it is there already."""
    key = (
        model_calls.c.rollout_id == row["rollout_id"],
        model_calls.c.attempt == row["attempt"],
        model_calls.c.call_index == row["call_index"],
    )
    known = update(model_calls).where(*key).values(observations=row["observations"])
    if connection.execute(known).rowcount == 0:
        connection.execute(insert(model_calls), row)


def calls(connection: Connection, rollout_id: str, attempt: int | None = None) -> list[ModelCall]:
    """The model calls of an attempt, by default of the last that has any, in order."""
    statement = select(model_calls).where(model_calls.c.rollout_id == rollout_id)
    if attempt is not None:
        statement = statement.where(model_calls.c.attempt == attempt)
    rows = connection.execute(statement.order_by(model_calls.c.attempt, model_calls.c.call_index)).all()
    last = max((row.attempt for row in rows), default=0)
    whole: dict[int, TokenIds] = {}
    return [_call(row, whole) for row in rows if row.attempt == last]


def _call(row: Any, whole: dict[int, TokenIds]) -> ModelCall:
    prompt = row.prompt_ids
    if prompt is not None and row.prefix_call is not None:
        prompt = np.concatenate([whole[row.prefix_call], prompt])
    if prompt is not None and row.response_ids is not None:
        whole[row.call_index] = np.concatenate([prompt, row.response_ids])
    return ModelCall(
        index=row.call_index,
        messages=row.messages,
        response=row.response,
        finish_reason=row.finish_reason,
        engine=row.engine,
        started_at=row.started_at,
        latency_s=row.latency_s,
        n_prompt_tokens=row.n_prompt_tokens,
        n_response_tokens=row.n_response_tokens,
        policy_version=row.policy_version,
        prompt_ids=prompt,
        response_ids=row.response_ids,
        response_logprobs=row.response_logprobs,
        sampling=row.sampling,
        observations=row.observations,
    )


def store_segments(
    connection: Connection, rollout_id: str, batch_id: str, attempt: int, rows: Sequence[Segment]
) -> None:
    """Make these the training rows of a rollout, in place of any from an earlier attempt."""
    connection.execute(delete(segment_rows).where(segment_rows.c.rollout_id == bindparam("b_id")), {"b_id": rollout_id})
    if rows:
        connection.execute(
            insert(segment_rows),
            [
                {
                    "rollout_id": rollout_id,
                    "segment_index": index,
                    "batch_id": batch_id,
                    "attempt": attempt,
                    "prompt_ids": row.prompt_ids,
                    "response_ids": row.response_ids,
                    "response_mask": row.response_mask,
                    "response_logprobs": row.response_logprobs,
                    "policy_versions": row.policy_versions,
                }
                for index, row in enumerate(rows)
            ],
        )


def segments_of(
    connection: Connection, batch_id: str, rollout_ids: Sequence[str] | None = None
) -> dict[str, tuple[Segment, ...]]:
    """Rollout id → its training rows, for rollouts of a batch that have ended."""
    statement = (
        select(segment_rows)
        .join(rollouts, rollouts.c.rollout_id == segment_rows.c.rollout_id)
        .where(segment_rows.c.batch_id == batch_id, rollouts.c.finish_seq.is_not(None))
        .order_by(segment_rows.c.rollout_id, segment_rows.c.segment_index)
    )
    if rollout_ids is not None:
        statement = statement.where(segment_rows.c.rollout_id.in_(rollout_ids))
    found: defaultdict[str, list[Segment]] = defaultdict(list)
    for row in connection.execute(statement):
        found[row.rollout_id].append(
            Segment(row.prompt_ids, row.response_ids, row.response_mask, row.response_logprobs, row.policy_versions)
        )
    return {rollout_id: tuple(rows) for rollout_id, rows in found.items()}
