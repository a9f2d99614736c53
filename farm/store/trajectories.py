"""Model calls as they happen, and the training rows built from them.

A call's prompt repeats the whole conversation. So only the ids beyond those of the longest call that it continues are
stored, with that call's number, and its tools only if they differ from that call's. Storage grows with the
conversation, not with its square.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, fields
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
from sqlalchemy import Connection, Select, String, bindparam, delete, exists, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from farm.errors import EngineError
from farm.ids import RolloutRef
from farm.records.experts.expert_stretches import ExpertStretch
from farm.records.experts.routed_experts import CallExperts
from farm.records.prefixes import Prefixes
from farm.records.request import TrainCalls
from farm.records.rollout import Stage, State
from farm.records.submission import RowRewards
from farm.records.trajectory import UNTRAINED, ModelCall, Segment, TokenIds, ToolSchema, VersionSpan
from farm.row_builders import WHOLE, build_rows, chosen_calls
from farm.store.blobs import stored_experts
from farm.store.retention.kept import check_kept
from farm.store.rollouts import batches, rewards, rollouts
from farm.store.sql.sanitize import fitting, written
from farm.store.sql.schema import ModelCallRow, SegmentRow

model_calls = ModelCallRow.__table__
segment_rows = SegmentRow.__table__

_AS_THEY_ARE = tuple(
    {each.name for each in fields(ModelCall)} - {"index", "prompt_ids", "versions", "routed_experts", "images"}
)
"""The fields of a call that are stored unchanged, in columns of the same names."""
_OF_SEGMENT = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "policy_versions", "mismatch")
"""The same for a training row."""

# Built once, like those of `farm.store.rollouts`: each turn of each rollout executes both.
_CALL_KEY = tuple(model_calls.primary_key.columns)
_OBSERVED = ("observations", "n_invalid", "reward")


def _put_call(insert_into: Any) -> Any:
    """Return the statement, in one dialect, that inserts a call's row or updates the observations of the old one."""
    add = insert_into(model_calls)
    return add.on_conflict_do_update(index_elements=_CALL_KEY, set_={name: add.excluded[name] for name in _OBSERVED})


_PUT_CALL = {"sqlite": _put_call(sqlite.insert), "postgresql": _put_call(postgresql.insert)}
_observe_call = (
    update(model_calls)
    .where(*(column == bindparam(f"b_{column.name}") for column in _CALL_KEY))
    .values({name: bindparam(f"b_{name}") for name in _OBSERVED})
)
_delete_segments = delete(segment_rows).where(segment_rows.c.rollout_id == bindparam("b_id"))
_add_segments = insert(segment_rows)
_ID = bindparam("b_id", type_=String)
_IDS = bindparam("b_ids", type_=String, expanding=True)

_RENDERED_AGAIN = "rendered again: the engine's prompt goes on from the ids of no earlier call"


class CallLog:
    """Turns the model calls of one attempt into rows; remembers the ids so far to store only new ones.

    It makes the ids of the calls views of one array per branch, and calls with equal tools share one list, so that
    memory does not grow with the square of the conversation either: a rollout of a hundred turns would take tens of
    megabytes, and a worker has hundreds of rollouts.
    """

    def __init__(self, rollout_id: str, attempt: int) -> None:
        self.rollout_id = rollout_id
        self.attempt = attempt
        self._known = Prefixes()
        self._calls: dict[int, ModelCall] = {}
        self._prefix: dict[int, int | None] = {}
        self._tools: dict[str, list[ToolSchema]] = {}

    def row(self, call: ModelCall) -> dict[str, Any]:
        """Return the values of a call's row."""
        if self._calls.get(call.index) is not call:
            self._take(call)
        prefix = self._prefix[call.index]
        prompt = call.prompt_ids
        if prompt is not None and prefix is not None:
            prompt = prompt[self._known.length(prefix) :]
        is_repeated = prefix is not None and self._calls[prefix].tools is call.tools
        return {
            "rollout_id": self.rollout_id,
            "attempt": self.attempt,
            **{name: getattr(call, name) for name in _AS_THEY_ARE},
            "call_index": call.index,
            "prefix_call": prefix,
            "prompt_ids": prompt,
            "tools": None if is_repeated else call.tools,
            "versions": [{"version": span.version, "start": span.start, "end": span.end} for span in call.versions],
            "images": list(call.images) or None,
        }

    def _take(self, call: ModelCall) -> None:
        prompt, response = call.prompt_ids, call.response_ids
        prefix = None if prompt is None else self._known.longest(prompt, call.index, call.images)
        if prompt is not None and prefix is None and not call.begins:
            # known only now, for an engine that renders conversations itself
            call.begins = _RENDERED_AGAIN if self._prefix else "first"
        if call.tools is not None:
            # compared as text: the order of a schema's keys is part of the prompt
            call.tools = self._tools.setdefault(written(call.tools), call.tools)
        self._calls[call.index], self._prefix[call.index] = call, prefix
        if prompt is not None and response is not None:
            whole = np.concatenate([prompt, response])
            self._known.put(call.index, whole, call.images)
            self._share(call.index, whole)

    def _share(self, index: int | None, whole: TokenIds) -> None:
        """Let a call and all calls that it continues share one array of ids."""
        while index is not None:
            call, end = self._calls[index], self._known.length(index)
            self._known.share(index, whole)
            n_prompt = len(call.prompt_ids) if call.prompt_ids is not None else 0
            call.prompt_ids, call.response_ids = whole[:n_prompt], whole[n_prompt:end]
            index = self._prefix[index]


def record_call(connection: Connection, row: dict[str, Any], experts: CallExperts | None = None) -> None:
    """Write a call's row; of an existing row, update observations, invalid tool calls among them, and reward.

    `experts` are written with it. Raises EngineError for unstorable values.
    """
    changed = {f"b_{name}": row[name] for name in (*(column.name for column in _CALL_KEY), *_OBSERVED)}
    with fitting(EngineError, f"{row['rollout_id']}: call {row['call_index']} of engine {row['engine']}"):
        # observations mostly belong to an existing row; packing its arrays again would cost more
        if not row["observations"] or not connection.execute(_observe_call, changed).rowcount:
            connection.execute(_PUT_CALL[connection.dialect.name], row)
    if experts is not None:
        stored_experts.keep(connection, row["rollout_id"], row["attempt"], row["call_index"], experts)


def calls(connection: Connection, rollout_id: str, attempt: int | None = None) -> list[ModelCall]:
    """Return the model calls of an attempt, by default of the last with any, in order. Raises Pruned."""
    of_rollout = model_calls.c.rollout_id == rollout_id
    chosen_attempt = (
        select(func.max(model_calls.c.attempt)).where(of_rollout).scalar_subquery() if attempt is None else attempt
    )
    statement = (
        select(model_calls)
        .where(of_rollout, model_calls.c.attempt == chosen_attempt)
        .order_by(model_calls.c.call_index)
    )
    recorded = _in_full(connection.execute(statement))
    if not recorded:
        check_kept(connection, RolloutRef.of(rollout_id).batch_id)
    return recorded


def _call(row: Any, whole: dict[int, TokenIds]) -> ModelCall:
    prompt = row.prompt_ids
    if prompt is not None and row.prefix_call is not None:
        prompt = np.concatenate([whole[row.prefix_call], prompt])
    if prompt is not None and row.response_ids is not None:
        whole[row.call_index] = np.concatenate([prompt, row.response_ids])
    return ModelCall(
        **{name: getattr(row, name) for name in _AS_THEY_ARE},
        index=row.call_index,
        prompt_ids=prompt,
        versions=tuple(VersionSpan(each["version"], each["start"], each["end"]) for each in row.versions),
        images=tuple(row.images or ()),
    )


def mark_untrained(connection: Connection, rollout_id: str, attempt: int, calls: Sequence[ModelCall]) -> None:
    """Label these calls of an attempt as not to be trained on."""
    for call in calls:
        connection.execute(
            update(model_calls)
            .where(
                model_calls.c.rollout_id == rollout_id,
                model_calls.c.attempt == attempt,
                model_calls.c.call_index == call.index,
            )
            .values(labels={**call.labels, UNTRAINED: "no"})
        )


def store_segments(
    connection: Connection,
    rollout_id: str,
    batch_id: str,
    attempt: int,
    rows: Sequence[Segment],
    stretches: Sequence[Sequence[ExpertStretch]] = (),
) -> None:
    """Store the training rows of a rollout, in place of those of an earlier attempt.

    `stretches` says for each row where the calls of the attempt have its experts; empty if they have none.
    """
    connection.execute(_delete_segments, {"b_id": rollout_id})
    if rows:
        connection.execute(
            _add_segments,
            [
                {
                    "rollout_id": rollout_id,
                    "segment_index": index,
                    "batch_id": batch_id,
                    "attempt": attempt,
                    **{name: getattr(row, name) for name in _OF_SEGMENT},
                    "turn_rewards": [list(each) for each in row.turn_rewards] or None,
                    "images": list(row.images) or None,
                    "expert_stretches": [list(astuple(each)) for each in stretches[index]] if any(stretches) else None,
                }
                for index, row in enumerate(rows)
            ],
        )


def segments_of(
    connection: Connection, batch_id: str, rollout_ids: Sequence[str] | None = None, *, experts: bool = False
) -> dict[str, tuple[Segment, ...]]:
    """Return rollout id → training rows, for ended rollouts of a batch; with `experts` where they have any.

    Rows of a rollout that was cancelled during its run are built from the calls recorded until then. Raises Pruned if
    they are not kept.
    """
    check_kept(connection, batch_id)
    chosen = rollout_ids is not None
    bound = {"b_id": batch_id, "b_ids": list(rollout_ids)} if rollout_ids is not None else {"b_id": batch_id}
    segments: defaultdict[str, list[Segment]] = defaultdict(list, _cut_short(connection, chosen, bound))
    stretches: defaultdict[tuple[str, int], list[list[list[int]]]] = defaultdict(list)
    for row in connection.execute(_segments_of(chosen), bound):
        stretches[row.rollout_id, row.attempt].append(row.expert_stretches or [])
        segments[row.rollout_id].append(
            Segment(
                **{name: getattr(row, name) for name in _OF_SEGMENT},
                turn_rewards=tuple((position, reward) for position, reward in row.turn_rewards or ()),
                images=tuple(row.images or ()),
            )
        )
    for (rollout_id, attempt), of_rollout in stretches.items() if experts else ():
        if any(of_rollout):
            rows = zip(segments[rollout_id], of_rollout, strict=True)
            segments[rollout_id] = stored_experts.with_experts(connection, rollout_id, attempt, list(rows))
    for rollout_id, of_rows in connection.execute(_rewards_of_rows(chosen), bound).tuples():
        segments[rollout_id] = RowRewards.model_validate(of_rows).applied(segments[rollout_id])
    return {rollout_id: tuple(rows) for rollout_id, rows in segments.items()}


@cache
def _segments_of(chosen: bool) -> Select[Any]:
    """Return the statement for the rows of a batch's ended rollouts; if `chosen` for those with given ids."""
    statement = (
        select(segment_rows)
        .join(rollouts, rollouts.c.rollout_id == segment_rows.c.rollout_id)
        .where(segment_rows.c.batch_id == _ID, rollouts.c.finish_seq.is_not(None))
        .order_by(segment_rows.c.rollout_id, segment_rows.c.segment_index)
    )
    return statement.where(segment_rows.c.rollout_id.in_(_IDS)) if chosen else statement


@cache
def _rewards_of_rows(chosen: bool) -> Select[Any]:
    """Return the statement for the rewards of rows of each rollout whose newest score has any."""
    newer = rewards.alias()
    statement = (
        select(rewards.c.rollout_id, rewards.c.of_rows)
        .join(rollouts, rollouts.c.rollout_id == rewards.c.rollout_id)
        .where(
            rollouts.c.batch_id == _ID,
            rollouts.c.finish_seq.is_not(None),
            rewards.c.of_rows.is_not(None),
            ~exists().where(newer.c.rollout_id == rewards.c.rollout_id, newer.c.attempt > rewards.c.attempt),
        )
    )
    return statement.where(rewards.c.rollout_id.in_(_IDS)) if chosen else statement


@cache
def _calls_cut_short(chosen: bool) -> Select[Any]:
    """Return the statement for the calls of rollouts that were cancelled during their runs."""
    statement = (
        select(model_calls)
        .join(rollouts, rollouts.c.rollout_id == model_calls.c.rollout_id)
        .where(
            rollouts.c.batch_id == _ID,
            rollouts.c.state == State.CANCELLED.value,
            rollouts.c.stage == Stage.RUN.value,
            # the cancel raised the attempt number above that of the attempt under way
            model_calls.c.attempt == rollouts.c.attempt - 1,
        )
        .order_by(model_calls.c.rollout_id, model_calls.c.call_index)
    )
    return statement.where(rollouts.c.rollout_id.in_(_IDS)) if chosen else statement


def _cut_short(connection: Connection, chosen: bool, bound: Mapping[str, Any]) -> dict[str, list[Segment]]:
    cut_short = connection.execute(_calls_cut_short(chosen), bound)
    calls_of_rollouts = [
        (rollout_id, _in_full(rows)) for rollout_id, rows in groupby(cut_short, key=lambda row: str(row.rollout_id))
    ]
    if not calls_of_rollouts:
        return {}
    request = connection.scalar(select(batches.c.request).where(batches.c.batch_id == bound["b_id"])) or {}
    rule, builder = TrainCalls.model_validate(request.get("train_calls") or {}), request.get("row_builder")
    # only workers call a plug-in's: readers may not have it installed, and no row of these is trained on
    name = builder if builder in WHOLE else "prefix"
    return {
        rollout_id: list(build_rows(name, chosen_calls(rule, calls), calls)) for rollout_id, calls in calls_of_rollouts
    }


def _in_full(rows: Iterable[Any]) -> list[ModelCall]:
    """Return the calls of one attempt, in order, each with the ids that it shares with earlier ones."""
    whole: dict[int, TokenIds] = {}
    return [_call(row, whole) for row in rows]
