"""Cancel and rescore of rollouts by a client."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

from sqlalchemy import ColumnElement, Connection, Select, func, literal, or_, select, update

from farm.errors import NotFound
from farm.ids import RolloutRef
from farm.records.rollout import Stage, State
from farm.store.locks import lock_batches, lock_rollouts
from farm.store.retention.kept import check_kept
from farm.store.rollout_counts import forget
from farm.store.rollouts import LEASE_CLEARED, attempts, batches, chunks, ended_unscored, rewards, rollouts
from farm.store.sql.clock import db_now

Some: TypeAlias = Sequence[str] | None
"""Ids of rollouts of a target, few enough for one statement; None for all of them."""


def cancel(connection: Connection, target: RolloutRef, rollout_ids: Collection[str] | None = None) -> list[str]:
    """Cancel the open rollouts of a batch, a group or a rollout, or only `rollout_ids` of it. Returns their ids.

    One that is being scored again is completed with its earlier score. Raises NotFound, and cancels nothing, if any of
    the rollouts does not exist. If a process ends a rollout of the batch at the same moment, one of the two waits for
    the other: the first wins, and the second does nothing.
    """
    # no rollout of the batch ends in between: that takes a number, and numbers are assigned under this lock
    batch = update(batches).where(batches.c.batch_id == target.batch_id)
    last_seq = connection.execute(batch.values(last_seq=batches.c.last_seq).returning(batches.c.last_seq)).scalar()
    ended: list[str] = []
    for some in _parts(rollout_ids):
        _check(connection, target, some)
        ids = _end(connection, target, some, (last_seq or 0) + len(ended))
        _close(connection, ids)
        ended += ids
    if ended:
        connection.execute(batch.values(last_seq=batches.c.last_seq + len(ended)))
    return ended


def _end(connection: Connection, target: RolloutRef, some: Some, given: int) -> list[str]:
    """End open rollouts, with numbers after `given`, in order; return their ids."""
    order = func.row_number().over(order_by=(rollouts.c.group_index, rollouts.c.sample_index))
    lock_rollouts(connection, *_conditions(target, some), rollouts.c.finish_seq.is_(None))
    live = _of(target, some, rollouts.c.rollout_id, order.label("n")).where(rollouts.c.finish_seq.is_(None)).subquery()
    ended = connection.execute(
        update(rollouts)
        .where(rollouts.c.rollout_id == live.c.rollout_id)
        .values(
            attempt=rollouts.c.attempt + 1,
            finish_seq=given + live.c.n,
            **ended_unscored(State.CANCELLED),
        )
        .returning(rollouts.c.finish_seq, rollouts.c.rollout_id)
    )
    return [rollout_id for _, rollout_id in sorted(ended.tuples())]


def _close(connection: Connection, ids: Sequence[str]) -> None:
    for some in chunks(ids):
        connection.execute(
            update(attempts)
            .where(attempts.c.rollout_id.in_(some), attempts.c.finished_at.is_(None))
            .values(finished_at=db_now(), result="cancelled")
        )


def rescore(connection: Connection, target: RolloutRef, rollout_ids: Collection[str] | None = None) -> list[str]:
    """Queue rollouts that have run for scoring again, with fresh budgets. Returns the ids. Raises NotFound, Pruned."""
    scored = (
        rollouts.c.state.in_([State.COMPLETED.value, State.FAILED.value]),
        rollouts.c.stage == Stage.EVAL.value,
        rollouts.c.submission.is_not(None),
    )
    requeued: list[str] = []
    lock_batches(connection, [target.batch_id])
    check_kept(connection, target.batch_id)
    for some in _parts(rollout_ids):
        _check(connection, target, some)
        lock_rollouts(connection, *_conditions(target, some), *scored)
        queued = (
            update(rollouts)
            # repeated: Postgres evaluates only the second again on a row that changed after the first
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
                **LEASE_CLEARED,
            )
            .returning(rollouts.c.group_index, rollouts.c.sample_index, rollouts.c.rollout_id)
        )
        requeued += [rollout_id for _, _, rollout_id in sorted(connection.execute(queued).tuples())]
    if requeued:
        forget(connection, target.batch_id)
    return requeued


def _parts(rollout_ids: Collection[str] | None) -> Iterator[Some]:
    return iter([None]) if rollout_ids is None else chunks(sorted(set(rollout_ids)))


def _of(target: RolloutRef, some: Some, *columns: Any) -> Select[Any]:
    """Select columns of the rollouts that a target names, or only of `some` of them."""
    return select(*columns).where(*_conditions(target, some))


def _conditions(target: RolloutRef, some: Some) -> Iterator[ColumnElement[bool]]:
    yield rollouts.c.batch_id == target.batch_id
    if target.group_index is not None:
        yield rollouts.c.group_index == target.group_index
    if target.sample_index is not None:
        yield rollouts.c.sample_index == target.sample_index
    if some is not None:
        yield rollouts.c.rollout_id.in_(some)


def _check(connection: Connection, target: RolloutRef, some: Some) -> None:
    """Raise NotFound unless the target and each of the named rollouts exist."""
    if connection.execute(_of(target, None, rollouts.c.rollout_id).limit(1)).first() is None:
        raise NotFound(f"there is no {target.kind} {target}")
    if some is not None:
        known = set(connection.execute(_of(target, some, rollouts.c.rollout_id)).scalars())
        for missing in [each for each in some if each not in known]:
            raise NotFound(f"{target.kind} {target} has no rollout {missing}")


def cancelled_of(connection: Connection, rollout_ids: Sequence[str]) -> list[str]:
    """Return the rollouts that are cancelled, or completed with a score older than their attempt, in the order given.

    The latter remain when a rescore is cancelled.
    """
    scored_now = select(literal(1)).where(
        rewards.c.rollout_id == rollouts.c.rollout_id, rewards.c.attempt == rollouts.c.attempt
    )
    as_before = (rollouts.c.state == State.COMPLETED.value) & ~scored_now.exists()
    cancelled: set[str] = set()
    for ids in chunks(rollout_ids):
        some = rollouts.c.rollout_id.in_(ids)
        statement = select(rollouts.c.rollout_id).where(some, or_(rollouts.c.state == State.CANCELLED.value, as_before))
        cancelled.update(connection.execute(statement).scalars())
    return [each for each in rollout_ids if each in cancelled]
