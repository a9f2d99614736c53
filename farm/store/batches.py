"""Batches: written once at submit, then read: their numbers, their rollouts in the order in which they ended."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import Connection, Row, Select, Table, func, insert, literal, select

from farm.errors import Conflict, NotFound
from farm.request import BatchRequest
from farm.rollout import BatchStatus, Failure, Outcome, Reward, Rollout, Stage, State, Timing
from farm.store.clock import db_now
from farm.store.rollouts import attempts, batches, rewards, rollouts
from farm.store.tables import InstanceRow
from farm.trajectory import Segment

instances = cast(Table, InstanceRow.__table__)


def create(connection: Connection, request: BatchRequest, fingerprint: str) -> tuple[str, bool]:
    """Write a batch and all its rollouts: (batch id, whether it is new). Conflict if its key names another request."""
    if request.idempotency_key is not None:
        known = connection.execute(
            select(batches.c.batch_id, batches.c.fingerprint).where(
                batches.c.idempotency_key == request.idempotency_key
            )
        ).one_or_none()
        if known is not None:
            if known.fingerprint != fingerprint:
                raise Conflict(
                    f"idempotency key {request.idempotency_key!r} names batch {known.batch_id}, which asks for "
                    "something else: use a new key, or submit the same request"
                )
            return known.batch_id, False
    batch_id = "b" + secrets.token_hex(5)
    now = connection.execute(select(db_now())).scalar_one()
    connection.execute(
        insert(batches),
        {
            "batch_id": batch_id,
            "idempotency_key": request.idempotency_key,
            "fingerprint": fingerprint,
            "created_at": now,
            "n_samples": request.n_samples,
            "n_rollouts": len(request.instances) * request.n_samples,
            "last_seq": 0,
            "priority": request.priority,
            "max_attempts": request.max_attempts,
            "request": request.model_dump(mode="json", exclude={"instances"}),
        },
    )
    connection.execute(
        insert(instances),
        [
            {
                "batch_id": batch_id,
                "group_index": index,
                "data_source": instance.data_source,
                "instance_id": instance.instance_id,
                "fields": instance.fields,
            }
            for index, instance in enumerate(request.instances)
        ],
    )
    connection.execute(insert(rollouts), _new_rollouts(request, batch_id, now))
    return batch_id, True


def _new_rollouts(request: BatchRequest, batch_id: str, now: float) -> list[dict[str, Any]]:
    fresh = {
        "stage": Stage.INIT.value,
        "state": State.QUEUED.value,
        "attempt": 1,
        "n_failures": 0,
        "queued_at": now,
        "ready_at": now,
        "ring_at": now,
        "n_rings": 0,
        "n_turns": 0,
        "n_response_tokens": 0,
        "submitted_at": now,
    }
    return [
        fresh
        | {
            "rollout_id": f"{batch_id}.{group}.{sample}",
            "batch_id": batch_id,
            "group_index": group,
            "sample_index": sample,
            "data_source": instance.data_source,
            "instance_id": instance.instance_id,
        }
        for group, instance in enumerate(request.instances)
        for sample in range(request.n_samples)
    ]


def request_of(connection: Connection, batch_id: str) -> tuple[dict[str, Any], int]:
    """What a batch asked for, without its instances, and its max_attempts. Raises NotFound."""
    statement = select(batches.c.request, batches.c.max_attempts).where(batches.c.batch_id == batch_id)
    row = connection.execute(statement).one_or_none()
    if row is None:
        raise NotFound(f"there is no batch {batch_id}")
    return row.request, row.max_attempts


def instance_fields(connection: Connection, batch_id: str, group_index: int) -> tuple[str, dict[str, Any]]:
    """(data_source, fields) of one instance. Raises NotFound."""
    row = connection.execute(
        select(instances.c.data_source, instances.c.fields).where(
            instances.c.batch_id == batch_id, instances.c.group_index == group_index
        )
    ).one_or_none()
    if row is None:
        raise NotFound(f"batch {batch_id} has no instance {group_index}")
    return row.data_source, row.fields


def recent(connection: Connection, limit: int) -> list[str]:
    """The ids of the newest batches, newest first."""
    statement = select(batches.c.batch_id).order_by(batches.c.created_at.desc()).limit(limit)
    return list(connection.execute(statement).scalars())


def status(connection: Connection, batch_id: str) -> BatchStatus:
    """A batch in numbers. Raises NotFound."""
    batch = connection.execute(
        select(batches.c.n_rollouts, batches.c.created_at).where(batches.c.batch_id == batch_id)
    ).one_or_none()
    if batch is None:
        raise NotFound(f"there is no batch {batch_id}")
    rows = connection.execute(
        select(
            rollouts.c.stage,
            rollouts.c.state,
            rollouts.c.failure_kind,
            func.count(literal(1)).label("n"),
            func.sum(rollouts.c.reward).label("rewards"),
        )
        .where(rollouts.c.batch_id == batch_id)
        .group_by(rollouts.c.stage, rollouts.c.state, rollouts.c.failure_kind)
    ).all()
    ended = dict.fromkeys((State.COMPLETED, State.FAILED, State.CANCELLED), 0)
    stages = {stage: {State.QUEUED: 0, State.ACTIVE: 0} for stage in Stage}
    failures: dict[str, int] = {}
    total = 0.0
    for row in rows:
        state = State(row.state)
        if state in ended:
            ended[state] += row.n
        else:
            stages[Stage(row.stage)][state] += row.n
        if state is State.FAILED:
            failures[row.failure_kind] = failures.get(row.failure_kind, 0) + row.n
        if state is State.COMPLETED:
            total += row.rewards or 0.0
    n_completed = ended[State.COMPLETED]
    return BatchStatus(
        batch_id=batch_id,
        n_rollouts=batch.n_rollouts,
        n_completed=n_completed,
        n_failed=ended[State.FAILED],
        n_cancelled=ended[State.CANCELLED],
        stages=stages,
        failures=failures,
        mean_reward=total / n_completed if n_completed else None,
        created_at=batch.created_at,
    )


def ended_after(connection: Connection, batch_id: str, cursor: int, limit: int) -> list[Rollout]:
    """The rollouts of a batch that ended after a cursor, in that order, without their segments."""
    statement = (
        select(rollouts)
        .where(rollouts.c.batch_id == batch_id, rollouts.c.finish_seq > cursor)
        .order_by(rollouts.c.finish_seq)
        .limit(limit)
    )
    return _rollouts(connection, statement)


def groups_after(connection: Connection, batch_id: str, cursor: int, limit: int) -> list[list[Rollout]]:
    """The groups of a batch whose last rollout ended after a cursor, in that order; only groups that are whole."""
    n_samples = select(batches.c.n_samples).where(batches.c.batch_id == batch_id).scalar_subquery()
    whole = (
        select(rollouts.c.group_index)
        .where(rollouts.c.batch_id == batch_id, rollouts.c.finish_seq.is_not(None))
        .group_by(rollouts.c.group_index)
        .having(func.count(literal(1)) == n_samples, func.max(rollouts.c.finish_seq) > cursor)
        .order_by(func.max(rollouts.c.finish_seq))
        .limit(limit)
    )
    order = list(connection.execute(whole).scalars())
    members: dict[int, list[Rollout]] = {index: [] for index in order}
    chosen = select(rollouts).where(rollouts.c.batch_id == batch_id, rollouts.c.group_index.in_(order))
    for rollout in _rollouts(connection, chosen.order_by(rollouts.c.sample_index)):
        members[rollout.group_index].append(rollout)
    return [members[index] for index in order]


def rollouts_of(connection: Connection, batch_id: str) -> list[Rollout]:
    """All rollouts of a batch, by group and sample, without their segments."""
    statement = select(rollouts).where(rollouts.c.batch_id == batch_id)
    return _rollouts(connection, statement.order_by(rollouts.c.group_index, rollouts.c.sample_index))


def rollout(connection: Connection, rollout_id: str) -> Rollout:
    """One rollout, without its segments. Raises NotFound."""
    found = _rollouts(connection, select(rollouts).where(rollouts.c.rollout_id == rollout_id))
    if not found:
        raise NotFound(f"there is no rollout {rollout_id}")
    return found[0]


def timings(connection: Connection, rollout_id: str) -> list[Timing]:
    """Every stage of every attempt of a rollout, in order."""
    statement = select(attempts).where(attempts.c.rollout_id == rollout_id).order_by(attempts.c.started_at)
    return [
        Timing(
            row.attempt,
            Stage(row.stage),
            row.queued_at,
            row.started_at,
            row.finished_at,
            row.node,
            row.result,
            Failure(row.result or "", row.error) if row.error else None,
        )
        for row in connection.execute(statement)
    ]


def rewards_of(connection: Connection, rollout_id: str) -> list[Reward]:
    """The scores of a rollout, newest last."""
    statement = select(rewards).where(rewards.c.rollout_id == rollout_id).order_by(rewards.c.attempt)
    return [Reward(row.value, row.details, row.evaluator, row.created_at) for row in connection.execute(statement)]


def with_segments(found: Sequence[Rollout], segments: dict[str, tuple[Segment, ...]]) -> list[Rollout]:
    """The same rollouts, holding their training rows."""
    return [_replace_segments(each, segments.get(each.rollout_id, ())) for each in found]


def _replace_segments(rollout: Rollout, segments: tuple[Segment, ...]) -> Rollout:
    values = {name: getattr(rollout, name) for name in Rollout.__slots__}
    return Rollout(**(values | {"segments": segments}))


def _rollouts(connection: Connection, statement: Select[Any]) -> list[Rollout]:
    return [_rollout(row) for row in connection.execute(statement)]


def _rollout(row: Row[Any]) -> Rollout:
    return Rollout(
        rollout_id=row.rollout_id,
        batch_id=row.batch_id,
        group_index=row.group_index,
        sample_index=row.sample_index,
        data_source=row.data_source,
        instance_id=row.instance_id,
        stage=Stage(row.stage),
        state=State(row.state),
        attempt=row.attempt,
        node=row.node,
        outcome=Outcome(row.outcome) if row.outcome else None,
        reward=row.reward,
        failure=Failure(row.failure_kind, row.failure_message or "") if row.failure_kind else None,
        n_turns=row.n_turns,
        n_response_tokens=row.n_response_tokens,
        submitted_at=row.submitted_at,
        finished_at=row.finished_at,
        finish_seq=row.finish_seq,
    )
