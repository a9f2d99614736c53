"""The newest batches in a line each: what a person looks through to find one."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from sqlalchemy import Connection, Row, case, func, literal, or_, select

from farm.errors import NotFound
from farm.records.rollout import BatchSummary, Stage, State
from farm.store.batches import instances
from farm.store.rollouts import batches, rollouts
from farm.store.sql.clock import db_now


def newest(connection: Connection, limit: int, before: str | None = None) -> list[BatchSummary]:
    """Return the newest batches in a line each, newest first, or those before one. Raises NotFound for that."""
    chosen = select(batches.c.batch_id).order_by(batches.c.created_at.desc(), batches.c.batch_id).limit(limit)
    if before is not None:
        at = connection.execute(select(batches.c.created_at).where(batches.c.batch_id == before)).scalar_one_or_none()
        if at is None:
            raise NotFound(f"there is no batch {before}")
        tied = (batches.c.created_at == at) & (batches.c.batch_id > before)
        chosen = chosen.where((batches.c.created_at < at) | tied)
    known = connection.execute(
        select(batches, (db_now() - batches.c.created_at).label("age_s"))
        .where(batches.c.batch_id.in_(chosen))
        .order_by(batches.c.created_at.desc(), batches.c.batch_id)
    ).all()
    ids = [row.batch_id for row in known]
    # one that waits for its second stage, or for another attempt, is queued, too
    was_begun = or_(rollouts.c.stage != Stage.INIT.value, rollouts.c.attempt > 1)
    begun = func.sum(case((was_begun, 1), else_=0))
    counts = connection.execute(
        select(
            rollouts.c.batch_id,
            rollouts.c.state,
            func.count(literal(1)).label("n"),
            func.sum(rollouts.c.reward).label("rewards"),
            begun.label("begun"),
        )
        .where(rollouts.c.batch_id.in_(ids))
        .group_by(rollouts.c.batch_id, rollouts.c.state)
    ).all()
    sources = connection.execute(
        select(instances.c.batch_id, instances.c.data_source).where(instances.c.batch_id.in_(ids)).distinct()
    ).all()
    counts_of: defaultdict[str, dict[State, Row[Any]]] = defaultdict(dict)
    for each in counts:
        counts_of[each.batch_id][State(each.state)] = each
    sources_of: defaultdict[str, list[str]] = defaultdict(list)
    for each in sources:
        sources_of[each.batch_id].append(each.data_source)
    return [_summary(row, counts_of[row.batch_id], tuple(sorted(sources_of[row.batch_id]))) for row in known]


def _summary(row: Row[Any], counts: dict[State, Row[Any]], sources: tuple[str, ...]) -> BatchSummary:
    n = {state: counts[state].n if state in counts else 0 for state in State}
    if n[State.QUEUED] + n[State.ACTIVE]:
        begun = n[State.QUEUED] < row.n_rollouts or any(each.begun for each in counts.values())
        state = State.ACTIVE if begun else State.QUEUED
    else:
        state = next((each for each in (State.COMPLETED, State.FAILED) if n[each]), State.CANCELLED)
    rewards = counts[State.COMPLETED].rewards if n[State.COMPLETED] else None
    return BatchSummary(
        batch_id=row.batch_id,
        state=state,
        n_rollouts=row.n_rollouts,
        n_completed=n[State.COMPLETED],
        n_failed=n[State.FAILED],
        n_cancelled=n[State.CANCELLED],
        mean_reward=None if rewards is None else rewards / n[State.COMPLETED],
        created_at=row.created_at,
        age_s=max(0.0, row.age_s),
        priority=row.priority,
        data_sources=sources,
        submitter=row.submitter,
    )
