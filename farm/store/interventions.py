"""What a client does to rollouts from outside: cancel them, have them scored again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

from sqlalchemy import Connection, Select, func, select, update

from farm.errors import NotFound
from farm.rollout import Outcome, Stage, State
from farm.store.clock import db_now
from farm.store.rollouts import CHUNK, attempts, batches, released, rollouts
from farm.target import Target

Some: TypeAlias = Sequence[str] | None
"""Ids of rollouts of a target, few enough for one statement; None are all of them."""


def cancel(connection: Connection, target: Target, rollout_ids: Collection[str] | None = None) -> list[str]:
    """End what has not ended of a batch, a group or a rollout, or of these rollouts of it: the ids.

    Raises NotFound if any of that does not exist; then nothing is cancelled. Whoever ends a rollout of the batch at the
    same moment waits, or is waited for: one of the two wins, and the other does nothing.
    """
    # nobody ends a rollout of the batch meanwhile: that takes a number, and numbers are given out behind this lock
    batch = update(batches).where(batches.c.batch_id == target.batch_id)
    given = connection.execute(batch.values(last_seq=batches.c.last_seq).returning(batches.c.last_seq)).scalar()
    ended: list[str] = []
    for some in _parts(rollout_ids):
        _check(connection, target, some)
        ids = _end(connection, target, some, (given or 0) + len(ended))
        _close(connection, ids)
        ended += ids
    if ended:
        connection.execute(batch.values(last_seq=batches.c.last_seq + len(ended)))
    return ended


def _end(connection: Connection, target: Target, some: Some, given: int) -> list[str]:
    """Number what has not ended from `given` on, in order."""
    order = func.row_number().over(order_by=(rollouts.c.group_index, rollouts.c.sample_index))
    live = _of(target, some, rollouts.c.rollout_id, order.label("n")).where(rollouts.c.finish_seq.is_(None)).subquery()
    ended = connection.execute(
        update(rollouts)
        .where(rollouts.c.rollout_id == live.c.rollout_id)
        .values(
            state=State.CANCELLED.value,
            outcome=Outcome.CANCELLED.value,
            failure_kind=None,
            failure_message=None,
            attempt=rollouts.c.attempt + 1,
            finished_at=db_now(),
            finish_seq=given + live.c.n,
            **released,
        )
        .returning(rollouts.c.finish_seq, rollouts.c.rollout_id)
    )
    return [rollout_id for _, rollout_id in sorted(ended.tuples())]


def _close(connection: Connection, ids: Sequence[str]) -> None:
    for start in range(0, len(ids), CHUNK):
        connection.execute(
            update(attempts)
            .where(attempts.c.rollout_id.in_(ids[start : start + CHUNK]), attempts.c.finished_at.is_(None))
            .values(finished_at=db_now(), result="cancelled")
        )


def rescore(connection: Connection, target: Target, rollout_ids: Collection[str] | None = None) -> list[str]:
    """Queue the scoring of what has something to score once more, with all its budgets: the ids. Raises NotFound."""
    scored = (
        rollouts.c.state.in_([State.COMPLETED.value, State.FAILED.value]),
        rollouts.c.stage == Stage.EVAL.value,
        rollouts.c.submission.is_not(None),
    )
    again: list[str] = []
    for some in _parts(rollout_ids):
        _check(connection, target, some)
        queued = (
            update(rollouts)
            # said twice: Postgres asks the second again of a row that has changed since it was found by the first
            .where(rollouts.c.rollout_id.in_(_of(target, some, rollouts.c.rollout_id).where(*scored)), *scored)
            .values(
                state=State.QUEUED.value,
                attempt=rollouts.c.attempt + 1,
                node=None,
                outcome=None,
                reward=None,
                n_failures=0,
                n_lost=0,
                failure_kind=None,
                failure_message=None,
                finished_at=None,
                finish_seq=None,
                queued_at=db_now(),
                ready_at=db_now(),
                **released,
            )
            .returning(rollouts.c.group_index, rollouts.c.sample_index, rollouts.c.rollout_id)
        )
        again += [rollout_id for _, _, rollout_id in sorted(connection.execute(queued).tuples())]
    return again


def _parts(rollout_ids: Collection[str] | None) -> Iterator[Some]:
    if rollout_ids is None:
        yield None
        return
    ids = sorted(set(rollout_ids))
    for start in range(0, len(ids), CHUNK):
        yield ids[start : start + CHUNK]


def _of(target: Target, some: Some, *columns: Any) -> Select[Any]:
    """What a target names, one rollout or many; of them only `some`."""
    found = select(*columns).where(rollouts.c.batch_id == target.batch_id)
    if target.group_index is not None:
        found = found.where(rollouts.c.group_index == target.group_index)
    if target.sample_index is not None:
        found = found.where(rollouts.c.sample_index == target.sample_index)
    return found if some is None else found.where(rollouts.c.rollout_id.in_(some))


def _check(connection: Connection, target: Target, some: Some) -> None:
    """Raise NotFound unless the target is there, and each of those named in it."""
    if connection.execute(_of(target, None, rollouts.c.rollout_id).limit(1)).first() is None:
        raise NotFound(f"there is no {target.kind} {target}")
    if some is not None:
        known = set(connection.execute(_of(target, some, rollouts.c.rollout_id)).scalars())
        for missing in [each for each in some if each not in known]:
            raise NotFound(f"{target.kind} {target} has no rollout {missing}")


def cancelled_of(connection: Connection, rollout_ids: Sequence[str]) -> list[str]:
    """Those of these that are cancelled, in the order given."""
    found: set[str] = set()
    for start in range(0, len(rollout_ids), CHUNK):
        some = rollouts.c.rollout_id.in_(rollout_ids[start : start + CHUNK])
        statement = select(rollouts.c.rollout_id).where(some, rollouts.c.state == State.CANCELLED.value)
        found.update(connection.execute(statement).scalars())
    return [each for each in rollout_ids if each in found]
