"""Numbers of the rollouts of a batch that ended last, for charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, literal, select

from farm.store.reports.rollout_filter import EVERY, RolloutFilter
from farm.store.reports.rollout_table import conditions
from farm.store.rollouts import rollouts

NEWEST = 5000
"""Rollouts per chart of a batch."""


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
    connection: Connection, batch_id: str, limit: int = NEWEST, wanted: RolloutFilter = EVERY
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
