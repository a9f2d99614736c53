"""Summaries of batches: one line for each of the newest, the times of the stages of one, and the
solve rates of a training run.

Solve rates are counted on request. An index finds the rollouts of an instance, so no second table has to agree with the
first; see `python -m benchmarks.solve_rates`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, case, func, literal, select

from farm.errors import NotFound
from farm.records.rollout import POLICY_OUTCOMES, BatchSummary, Spread, Stage, StageTimes, State
from farm.records.training_run import SolveRate
from farm.store.rollout_counts import RolloutCount, mean_reward, rollout_counts
from farm.store.rollouts import batches, chunks, instances, rollouts
from farm.store.sql.clock import db_now
from farm.store.sql.schema import AttemptRow


def newest(connection: Connection, limit: int, before: str | None = None) -> list[BatchSummary]:
    """Return the newest batches, newest first, or those before the batch `before`. Raises NotFound for that one."""
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
    sources = connection.execute(
        select(instances.c.batch_id, instances.c.data_source).where(instances.c.batch_id.in_(ids)).distinct()
    ).all()
    counts_of: defaultdict[str, list[RolloutCount]] = defaultdict(list)
    for count in rollout_counts(connection, ids):
        counts_of[count.batch_id].append(count)
    sources_of: defaultdict[str, list[str]] = defaultdict(list)
    for each in sources:
        sources_of[each.batch_id].append(each.data_source)
    return [_summary(row, counts_of[row.batch_id], tuple(sorted(sources_of[row.batch_id]))) for row in known]


def _summary(row: Row[Any], counts: Sequence[RolloutCount], sources: tuple[str, ...]) -> BatchSummary:
    n = {state: sum(count.n for count in counts if count.state is state) for state in State}
    if n[State.QUEUED] + n[State.ACTIVE]:
        begun = n[State.QUEUED] < row.n_rollouts or any(count.n_begun for count in counts)
        state = State.ACTIVE if begun else State.QUEUED
    else:
        state = next((each for each in (State.COMPLETED, State.FAILED) if n[each]), State.CANCELLED)
    return BatchSummary(
        batch_id=row.batch_id,
        state=state,
        n_rollouts=row.n_rollouts,
        n_completed=n[State.COMPLETED],
        n_failed=n[State.FAILED],
        n_cancelled=n[State.CANCELLED],
        mean_reward=mean_reward(counts),
        created_at=row.created_at,
        age_s=max(0.0, row.age_s),
        priority=row.priority,
        data_sources=sources,
        submitter=row.submitter,
    )


def stage_times(connection: Connection, batch_id: str) -> list[StageTimes]:
    """Return the times of a batch by stage, in order; stages without an ended attempt are left out."""
    columns = (AttemptRow.stage, AttemptRow.queued_at, AttemptRow.started_at, AttemptRow.finished_at)
    statement = (
        select(*columns)
        .join(rollouts, rollouts.c.rollout_id == AttemptRow.rollout_id)
        .where(rollouts.c.batch_id == batch_id, AttemptRow.finished_at.is_not(None))
    )
    by_stage: dict[Stage, list[tuple[float, float]]] = {stage: [] for stage in Stage}
    for stage, queued_at, started_at, finished_at in connection.execute(statement):
        assert finished_at is not None
        by_stage[Stage(stage)].append((started_at - queued_at, finished_at - started_at))
    return [
        StageTimes(
            stage, len(times), _spread([queued_s for queued_s, _ in times]), _spread([work_s for _, work_s in times])
        )
        for stage, times in by_stage.items()
        if times
    ]


def _spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    last = len(ordered) - 1
    return Spread(sum(ordered) / len(ordered), ordered[round(last * 0.5)], ordered[round(last * 0.99)], ordered[last])


def solve_rates(
    connection: Connection,
    run: str,
    data_source: str,
    instance_ids: Sequence[str] | None = None,
    min_version: int | None = None,
    solved_at: float = 1.0,
) -> list[SolveRate]:
    """Count the scored rollouts of a run by instance: of these instance ids, or of all instances with an id.

    Solved is a reward of at least `solved_at`. With `min_version`, only rollouts count whose newest token was sampled
    by such weights or newer ones. Broken rollouts have no score and never count.
    """
    solved = func.sum(case((rollouts.c.reward >= solved_at, 1), else_=0))
    of_run = select(literal(1)).where(batches.c.batch_id == rollouts.c.batch_id, batches.c.run == run)
    statement = (
        select(rollouts.c.instance_id, func.count(literal(1)), solved, func.avg(rollouts.c.reward))
        .where(
            rollouts.c.data_source == data_source,
            rollouts.c.reward.is_not(None),
            rollouts.c.outcome.in_([outcome.value for outcome in POLICY_OUTCOMES]),
            of_run.exists(),
        )
        .group_by(rollouts.c.instance_id)
        .order_by(rollouts.c.instance_id)
    )
    if min_version is not None:
        statement = statement.where(rollouts.c.version_max >= min_version)
    if instance_ids is None:
        return [SolveRate(*row) for row in connection.execute(statement)]
    wanted = sorted(set(instance_ids))
    rates: list[SolveRate] = []
    for some in chunks(wanted):
        rows = connection.execute(statement.where(rollouts.c.instance_id.in_(some)))
        rates += [SolveRate(*row) for row in rows]
    return sorted(rates, key=lambda rate: rate.instance_id)
