"""What a client does to rollouts from outside: cancel them, have them scored again."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, bindparam, select, update

from farm.rollout import FINAL_STATES, Outcome, Stage, State
from farm.store.clock import db_now
from farm.store.rollouts import CHUNK, attempts, batches, released, rollouts

_ENDED = sorted(FINAL_STATES)


def cancel(connection: Connection, batch_id: str, rollout_ids: Collection[str] | None) -> list[str]:
    """End all rollouts of a batch, or those named, that have not ended. Returns their ids."""
    connection.execute(update(batches).where(batches.c.batch_id == batch_id).values(last_seq=batches.c.last_seq))
    live = select(rollouts.c.rollout_id).where(rollouts.c.batch_id == batch_id, rollouts.c.state.not_in(_ENDED))
    ids = [found for found in connection.execute(live).scalars() if rollout_ids is None or found in rollout_ids]
    if not ids:
        return []
    last = connection.execute(
        update(batches)
        .where(batches.c.batch_id == batch_id)
        .values(last_seq=batches.c.last_seq + len(ids))
        .returning(batches.c.last_seq)
    ).scalar_one()
    statement = (
        update(rollouts)
        .where(rollouts.c.rollout_id == bindparam("b_id"))
        .values(
            state=State.CANCELLED.value,
            outcome=Outcome.CANCELLED.value,
            attempt=rollouts.c.attempt + 1,
            finished_at=db_now(),
            finish_seq=bindparam("b_seq"),
            **released,
        )
    )
    first = last - len(ids) + 1
    connection.execute(statement, [{"b_id": each, "b_seq": first + n} for n, each in enumerate(ids)])
    for start in range(0, len(ids), CHUNK):
        connection.execute(
            update(attempts)
            .where(attempts.c.rollout_id.in_(ids[start : start + CHUNK]), attempts.c.finished_at.is_(None))
            .values(finished_at=db_now(), result="cancelled")
        )
    return ids


def rescore(connection: Connection, batch_id: str, rollout_ids: Collection[str] | None) -> list[str]:
    """Queue the scoring of rollouts that have something to score once more. Returns their ids."""
    done = select(rollouts.c.rollout_id).where(
        rollouts.c.batch_id == batch_id,
        rollouts.c.state.in_([State.COMPLETED.value, State.FAILED.value]),
        rollouts.c.stage == Stage.EVAL.value,
        rollouts.c.submission.is_not(None),
    )
    ids = [found for found in connection.execute(done).scalars() if rollout_ids is None or found in rollout_ids]
    for start in range(0, len(ids), CHUNK):
        connection.execute(
            update(rollouts)
            .where(rollouts.c.rollout_id.in_(ids[start : start + CHUNK]))
            .values(
                state=State.QUEUED.value,
                attempt=rollouts.c.attempt + 1,
                node=None,
                outcome=None,
                reward=None,
                n_failures=0,
                failure_kind=None,
                failure_message=None,
                finished_at=None,
                finish_seq=None,
                queued_at=db_now(),
                ready_at=db_now(),
                **released,
            )
        )
    return ids
