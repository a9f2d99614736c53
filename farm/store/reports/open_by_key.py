"""Batches whose idempotency keys begin alike, as those do that one client of a protocol submitted."""

from __future__ import annotations

from sqlalchemy import Connection, func, literal, select

from farm.records.rollout import Stage, State
from farm.store.rollouts import batches, rollouts

_live = rollouts.c.finish_seq.is_(None)


def open_batches(connection: Connection, prefix: str) -> list[str]:
    """Return the ids of those that have rollouts which have not ended."""
    joined = select(batches.c.batch_id).join(rollouts, rollouts.c.batch_id == batches.c.batch_id)
    of_prefix = batches.c.idempotency_key.startswith(prefix, autoescape=True)
    return list(connection.execute(joined.where(_live, of_prefix).distinct().order_by(batches.c.batch_id)).scalars())


def batches_named(connection: Connection, prefix: str) -> list[str]:
    """Return the ids of all of them."""
    of_prefix = batches.c.idempotency_key.startswith(prefix, autoescape=True)
    return list(connection.execute(select(batches.c.batch_id).where(of_prefix)).scalars())


def open_counts(connection: Connection, prefix: str) -> dict[tuple[Stage, State], int]:
    """Return how many of their rollouts have not ended, by stage and state."""
    n = func.count(literal(1))
    joined = select(rollouts.c.stage, rollouts.c.state, n).join(batches, rollouts.c.batch_id == batches.c.batch_id)
    of_prefix = batches.c.idempotency_key.startswith(prefix, autoescape=True)
    rows = connection.execute(joined.where(_live, of_prefix).group_by(rollouts.c.stage, rollouts.c.state))
    return {(Stage(stage), State(state)): count for stage, state, count in rows.tuples()}
