"""The rollouts of a batch that ended last, in numbers for charts, and their cost, lost attempts included.

A cost is seconds of waiting, of work and of model calls, and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import CTE, Connection, case, func, literal, select

from farm.store.blobs.stored_annotations import annotation_rows
from farm.store.reports.rollout_table import EVERY, RolloutFilter, conditions
from farm.store.rollouts import attempts, rollouts
from farm.store.trajectories import model_calls

NEWEST = 500
"""Rollouts of a batch whose costs are added up."""
NEWEST_OF_CHART = 5000
"""Rollouts per chart of a batch."""
TRAINED = "trained"
"""The name of a trainer's annotation that says whether a rollout was trained on: 0 if it was left out."""


@dataclass(frozen=True, slots=True)
class RolloutCost:
    """One ended rollout: how it ended, and the cost of all its attempts.

    `waited_s` is the time in queues, `worked_s` the time of stages, `lost_s` that of attempts that did not count,
    `called_s` that of model calls and `called_tokens` what they sampled; the last two are 0 once model calls were
    pruned. `left_out` is true if a trainer wrote that it did not train on it; `step` is the newest step that a trainer
    annotated it for, None without annotations.
    """

    rollout_id: str
    group_index: int
    data_source: str
    state: str
    outcome: str
    reward: float | None
    n_turns: int
    n_tokens: int
    n_segments: int
    took_s: float
    waited_s: float = 0.0
    worked_s: float = 0.0
    lost_s: float = 0.0
    called_s: float = 0.0
    called_tokens: int = 0
    left_out: bool = False
    step: int | None = None


def newest_costs(connection: Connection, batch_id: str, limit: int = NEWEST) -> Sequence[RolloutCost]:
    """Return the last ended rollouts of a batch, newest first."""
    row = rollouts.c
    newest = _newest(batch_id, limit)
    columns = (row.group_index, row.data_source, row.state, row.outcome, row.reward, row.n_turns)
    sizes = (row.n_response_tokens, row.n_segments, row.finished_at - row.submitted_at)
    work = attempts.c.finished_at - attempts.c.started_at
    lost = case((attempts.c.attempt < newest.c.attempt, work), else_=0.0)
    worked = _by_rollout(
        connection,
        select(
            newest.c.rollout_id,
            func.sum(attempts.c.started_at - attempts.c.queued_at),
            func.coalesce(func.sum(work), 0.0),
            func.coalesce(func.sum(lost), 0.0),
        )
        .join(attempts, attempts.c.rollout_id == newest.c.rollout_id)
        .group_by(newest.c.rollout_id),
    )
    called = _by_rollout(
        connection,
        select(newest.c.rollout_id, func.sum(model_calls.c.latency_s), func.sum(model_calls.c.n_response_tokens))
        .join(model_calls, model_calls.c.rollout_id == newest.c.rollout_id)
        .group_by(newest.c.rollout_id),
    )
    trained = case((annotation_rows.c.name == TRAINED, annotation_rows.c.value))
    annotated = _by_rollout(
        connection,
        select(newest.c.rollout_id, func.max(trained), func.max(annotation_rows.c.step))
        .join(annotation_rows, annotation_rows.c.rollout_id == newest.c.rollout_id)
        .group_by(newest.c.rollout_id),
    )
    ended = select(row.rollout_id, *columns, *sizes).join(newest, newest.c.rollout_id == row.rollout_id)
    none_worked, none_called = (0.0, 0.0, 0.0), (0.0, 0)
    costs = []
    for each in connection.execute(ended.order_by(row.finish_seq.desc())):
        id = each[0]
        was_trained, step = annotated.get(id, (None, None))
        left_out = was_trained is not None and was_trained <= 0
        values: tuple[Any, ...] = (*each, *worked.get(id, none_worked), *called.get(id, none_called), left_out, step)
        costs.append(RolloutCost(*values))
    return costs


def newest_meeting(connection: Connection, batch_id: str, wanted: RolloutFilter, limit: int = NEWEST) -> frozenset[str]:
    """Return the ids of the rollouts of `newest_costs` that match a filter."""
    newest = _newest(batch_id, limit)
    statement = select(newest.c.rollout_id).join(rollouts, rollouts.c.rollout_id == newest.c.rollout_id)
    return frozenset(connection.execute(statement.where(*conditions(wanted))).scalars())


def _newest(batch_id: str, limit: int) -> CTE:
    row = rollouts.c
    return (
        select(row.rollout_id, row.attempt)
        .where(row.batch_id == batch_id, row.finish_seq.is_not(None))
        .order_by(row.finish_seq.desc())
        .limit(limit)
        .cte("newest")
    )


def _by_rollout(connection: Connection, statement: Any) -> dict[str, tuple[Any, ...]]:
    return {rollout_id: tuple(values) for rollout_id, *values in connection.execute(statement)}


@dataclass(frozen=True, slots=True)
class EndedNumbers:
    """One ended rollout in numbers; times as in the store."""

    group_index: int
    data_source: str
    outcome: str
    reward: float | None
    n_turns: int
    n_tokens: int
    submitted_at: float
    finished_at: float
    version_min: int | None
    version_max: int | None
    n_restarts: int


def newest_ended(
    connection: Connection, batch_id: str, limit: int = NEWEST_OF_CHART, wanted: RolloutFilter = EVERY
) -> Sequence[EndedNumbers]:
    """Return the last ended rollouts of a batch that match a filter, newest first."""
    row = rollouts.c
    columns = (row.group_index, row.data_source, row.outcome, row.reward, row.n_turns, row.n_response_tokens)
    more = (row.submitted_at, row.finished_at, row.version_min, row.version_max, row.n_restarts)
    statement = (
        select(*columns, *more)
        .where(row.batch_id == batch_id, row.finish_seq.is_not(None), *conditions(wanted))
        .order_by(row.finish_seq.desc())
        .limit(limit)
    )
    return [EndedNumbers(*each) for each in connection.execute(statement)]


def last_ends(connection: Connection, batch_id: str, limit: int = 100) -> Sequence[float]:
    """Return the end times of the last ended rollouts of a batch, newest first."""
    row = rollouts.c
    statement = (
        select(row.finished_at)
        .where(row.batch_id == batch_id, row.finish_seq.is_not(None))
        .order_by(row.finish_seq.desc())
        .limit(limit)
    )
    return list(connection.execute(statement).scalars())


def live_by_node(connection: Connection) -> Sequence[tuple[str, str, str, int]]:
    """Return (node, stage, state, count) of all placed rollouts that have not ended."""
    row = rollouts.c
    statement = (
        select(row.node, row.stage, row.state, func.count(literal(1)))
        .where(row.finish_seq.is_(None), row.node.is_not(None))
        .group_by(row.node, row.stage, row.state)
        .order_by(row.node)
    )
    return [(node, stage, state, n) for node, stage, state, n in connection.execute(statement).tuples()]
