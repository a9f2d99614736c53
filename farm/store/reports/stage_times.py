"""Queue and work times of the stages of a batch: one line per stage, over all ended attempts."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, select

from farm.records.rollout import Spread, Stage, StageTimes
from farm.store.rollouts import rollouts
from farm.store.sql.schema import AttemptRow


def of_batch(connection: Connection, batch_id: str) -> list[StageTimes]:
    """Return the times of a batch by stage, in order; stages without an ended attempt are left out."""
    columns = (AttemptRow.stage, AttemptRow.queued_at, AttemptRow.started_at, AttemptRow.finished_at)
    statement = (
        select(*columns)
        .join(rollouts, rollouts.c.rollout_id == AttemptRow.rollout_id)
        .where(rollouts.c.batch_id == batch_id, AttemptRow.finished_at.is_not(None))
    )
    result: dict[Stage, list[tuple[float, float]]] = {stage: [] for stage in Stage}
    for stage, queued_at, started_at, finished_at in connection.execute(statement):
        assert finished_at is not None
        result[Stage(stage)].append((started_at - queued_at, finished_at - started_at))
    return [
        StageTimes(
            stage, len(times), _spread([queued_s for queued_s, _ in times]), _spread([work_s for _, work_s in times])
        )
        for stage, times in result.items()
        if times
    ]


def _spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    last = len(ordered) - 1
    return Spread(sum(ordered) / len(ordered), ordered[round(last * 0.5)], ordered[round(last * 0.99)], ordered[last])
