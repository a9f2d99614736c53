"""Batches whose idempotency keys share a prefix, as all batches of one protocol's client do, and their rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, and_, bindparam, case, func, insert, literal, select, update

from farm.records.rollout import Rollout, Stage, State
from farm.store.batches import rollout_record
from farm.store.consumers import deliveries
from farm.store.rollouts import batches, rollouts
from farm.store.sql.schema import TerminalPositionRow

Described = tuple[dict[str, Any], Rollout]
positions = TerminalPositionRow.__table__

_same_batch = rollouts.c.batch_id == batches.c.batch_id
_live = rollouts.c.finish_seq.is_(None)


def shown(connection: Connection, prefix: str, consumer: str) -> list[Described]:
    """Return those that a consumer has not acknowledged, oldest first."""
    statement = _joined(prefix, consumer).where(deliveries.c.cursor.is_(None)).order_by(batches.c.created_at)
    return [(row.request.get("metadata", {}), rollout_record(row)) for row in connection.execute(statement)]


def any_without_position(connection: Connection, prefix: str) -> bool:
    """Return whether `assign_positions` would find any; a read, so that a client that polls writes nothing."""
    return connection.execute(_without_position(prefix).limit(1)).first() is not None


def assign_positions(connection: Connection, prefix: str) -> int:
    """Assign positions to ended rollouts without one, after all others, in the order of their ends; return how many.

    A rollout that is committed late gets a later position, and is not skipped. Raises IntegrityError if another process
    assigns these positions at the same moment: then they have them.
    """
    batch_ids = connection.execute(_without_position(prefix)).scalars().all()
    last = _last_position(connection, prefix)
    rows = [{"protocol": prefix, "position": n, "batch_id": each} for n, each in enumerate(batch_ids, last + 1)]
    if rows:
        connection.execute(insert(positions), rows)
        assigned = update(batches).where(batches.c.batch_id == bindparam("assigned"))
        connection.execute(assigned.values(awaits_position=None), [{"assigned": each} for each in batch_ids])
    return len(rows)


def ended(
    connection: Connection, prefix: str, consumer: str, after: int, limit: int
) -> tuple[Sequence[tuple[dict[str, Any], Rollout, bool]], int, int]:
    """Return the rollouts after a position, in order of positions, each with whether a consumer acknowledged it.

    Also returns the position of the last of them, `after` if there is none, and the last position of all.
    """
    same_batch = and_(positions.c.batch_id == batches.c.batch_id, positions.c.protocol == prefix)
    joined = _joined(prefix, consumer).add_columns(positions.c.position).join(positions, same_batch)
    ordered = joined.where(positions.c.position > after).order_by(positions.c.position)
    rows = connection.execute(ordered.limit(limit)).all()
    described = [(row.request.get("metadata", {}), rollout_record(row), row.cursor is not None) for row in rows]
    return described, rows[-1].position if rows else after, _last_position(connection, prefix)


def _last_position(connection: Connection, prefix: str) -> int:
    last = select(func.max(positions.c.position)).where(positions.c.protocol == prefix)
    return connection.execute(last).scalar_one() or 0


def _without_position(prefix: str) -> Select[Any]:
    statement = select(batches.c.batch_id).join(rollouts, _same_batch)
    chosen = statement.where(batches.c.awaits_position == prefix, rollouts.c.finished_at.is_not(None))
    return chosen.order_by(rollouts.c.finished_at, rollouts.c.rollout_id)


def _joined(prefix: str, consumer: str) -> Select[Any]:
    acknowledged = and_(deliveries.c.batch_id == batches.c.batch_id, deliveries.c.consumer == consumer)
    columns = (rollouts, batches.c.request, deliveries.c.cursor)
    statement = select(*columns).join(batches, _same_batch).outerjoin(deliveries, acknowledged)
    return statement.where(batches.c.idempotency_key.startswith(prefix, autoescape=True))


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


def submission(connection: Connection, rollout_id: str) -> dict[str, Any] | None:
    """Return the scored part of a rollout; None if it did not get that far."""
    statement = select(rollouts.c.submission).where(rollouts.c.rollout_id == rollout_id)
    content: dict[str, Any] | None = connection.execute(statement).scalar_one_or_none()
    return content
