"""Batches whose idempotency keys share a prefix, as all batches of one protocol's client do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, case, func, literal, select

from farm.records.rollout import Stage, State
from farm.store.rollouts import batches, rollouts

_live = rollouts.c.finish_seq.is_(None)


def open_batches(connection: Connection, prefix: str) -> dict[str, str]:
    """Return those with open rollouts: batch id → key."""
    joined = select(batches.c.batch_id, batches.c.idempotency_key).join(
        rollouts, rollouts.c.batch_id == batches.c.batch_id
    )
    of_prefix = batches.c.idempotency_key.startswith(prefix, autoescape=True)
    rows = connection.execute(joined.where(_live, of_prefix).distinct().order_by(batches.c.batch_id))
    return {row.batch_id: row.idempotency_key for row in rows}


def batches_named(connection: Connection, prefix: str) -> list[str]:
    """Return the ids of all of them."""
    of_prefix = batches.c.idempotency_key.startswith(prefix, autoescape=True)
    return list(connection.execute(select(batches.c.batch_id).where(of_prefix)).scalars())


def open_counts(connection: Connection, prefix: str) -> dict[tuple[Stage, State], int]:
    """Return the number of their open rollouts by stage and state."""
    n = func.count(literal(1))
    joined = select(rollouts.c.stage, rollouts.c.state, n).join(batches, rollouts.c.batch_id == batches.c.batch_id)
    of_prefix = batches.c.idempotency_key.startswith(prefix, autoescape=True)
    rows = connection.execute(joined.where(_live, of_prefix).group_by(rollouts.c.stage, rollouts.c.state))
    return {(Stage(stage), State(state)): count for stage, state, count in rows.tuples()}


@dataclass(frozen=True, slots=True)
class KeyedSummary:
    """A summary of a batch with the metadata of its submit; `updated_at` is the time of its last end."""

    metadata: dict[str, Any]
    n_rollouts: int
    n_ended: int
    n_cancelled: int
    mean_reward: float | None
    created_at: float
    updated_at: float


def summaries(connection: Connection, prefix: str) -> Iterator[KeyedSummary]:
    """Yield summaries of all, newest first, from one statement that is read lazily."""
    completed = case((rollouts.c.state == State.COMPLETED.value, 1), else_=0)
    was_cancelled = case((rollouts.c.state == State.CANCELLED.value, 1), else_=0)
    counts = (
        select(
            rollouts.c.batch_id,
            func.count(rollouts.c.finished_at).label("n_ended"),
            func.sum(was_cancelled).label("n_cancelled"),
            func.sum(completed).label("n_completed"),
            func.sum(case((rollouts.c.state == State.COMPLETED.value, rollouts.c.reward))).label("rewards"),
            func.max(func.coalesce(rollouts.c.finished_at, rollouts.c.submitted_at)).label("updated_at"),
        )
        .join(batches, rollouts.c.batch_id == batches.c.batch_id)
        .where(batches.c.idempotency_key.startswith(prefix, autoescape=True))
        .group_by(rollouts.c.batch_id)
        .subquery()
    )
    columns = (batches.c.request, batches.c.n_rollouts, batches.c.created_at, *counts.c)
    statement = select(*columns).join(counts, counts.c.batch_id == batches.c.batch_id)
    for row in connection.execute(statement.order_by(batches.c.created_at.desc(), batches.c.batch_id)):
        mean = None if row.rewards is None else row.rewards / row.n_completed
        metadata = row.request.get("metadata", {})
        n = (row.n_rollouts, row.n_ended, row.n_cancelled)
        yield KeyedSummary(metadata, *n, mean, row.created_at, row.updated_at)
