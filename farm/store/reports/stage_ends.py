"""The end of each stage of an attempt in the store, for the state of the stage's Celery task in Flower."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection, select

from farm.records.rollout import Outcome, Stage, State
from farm.retry_policy import DRAINED
from farm.store.rollouts import attempts, chunks, rollouts
from farm.store.sql.clock import age_of


class AttemptStage(NamedTuple):
    """A stage of an attempt at a rollout: what one task message names."""

    rollout_id: str
    attempt: int
    stage: Stage


@dataclass(frozen=True, slots=True)
class StageEnd:
    """`state` is completed, failed, cancelled, or queued for a stage that was taken away and is requeued."""

    state: State
    message: str
    age_s: float


def stage_ends(connection: Connection, requested: Collection[AttemptStage]) -> Mapping[AttemptStage, StageEnd]:
    """Return the ends of the stages that have ended. A stage that never began ends with its attempt."""
    ids = sorted({each.rollout_id for each in requested})
    ends: dict[AttemptStage, StageEnd] = {}
    for some in chunks(ids):
        ends |= _ends(connection, some, requested)
    return ends


def _ends(
    connection: Connection, ids: Collection[str], requested: Collection[AttemptStage]
) -> dict[AttemptStage, StageEnd]:
    now = (rollouts.c.rollout_id, rollouts.c.attempt, rollouts.c.state, age_of(rollouts.c.finished_at).label("age"))
    current = {row.rollout_id: row for row in connection.execute(select(*now).where(rollouts.c.rollout_id.in_(ids)))}
    tried = select(attempts, age_of(attempts.c.finished_at).label("age")).where(attempts.c.rollout_id.in_(ids))
    begun = {(row.rollout_id, row.attempt, row.stage): row for row in connection.execute(tried)}
    ends: dict[AttemptStage, StageEnd] = {}
    for each in requested:
        rollout = current.get(each.rollout_id)
        if rollout is None:
            continue
        if (row := begun.get((each.rollout_id, each.attempt, each.stage.value))) is not None:
            if row.age is None:
                continue
            last = row.attempt == rollout.attempt and rollout.state == State.FAILED.value
            ends[each] = StageEnd(_state(row.result, last), row.error or row.result, row.age)
        elif rollout.attempt > each.attempt:
            cancelled = rollout.state == State.CANCELLED.value
            # a stage that was taken away before it began has no end time
            state, age_s = (State.CANCELLED, rollout.age or 0.0) if cancelled else (State.QUEUED, float("inf"))
            ends[each] = StageEnd(state, f"attempt {each.attempt} was over before this was begun", age_s)
    return ends


def _state(result: str, last: bool) -> State:
    if result in {"advanced", "completed"}:
        return State.COMPLETED
    if result == Outcome.CANCELLED.value:
        return State.CANCELLED
    return State.QUEUED if result in (DRAINED, Outcome.LOST.value) and not last else State.FAILED
