"""Batches: submitted in one write, then read: their progress, and their rollouts in the order of their ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import groupby, islice
from typing import Any

from sqlalchemy import Connection, Integer, Row, Select, String, bindparam, func, insert, literal, select

from farm.callers import Caller
from farm.errors import Conflict, InvalidRequest, NotFound
from farm.ids import RolloutRef, new_batch_id, rollout_id
from farm.records.request import BatchRequest
from farm.records.rollout import BatchStatus, Failure, Outcome, Reward, Rollout, Stage, State, Timing
from farm.records.training_run import KeyedBatch
from farm.records.trajectory import Segment
from farm.store.access import api_keys
from farm.store.access.api_keys import check_room, check_room_again
from farm.store.access.sealed_secrets import SecretKey
from farm.store.blobs import stored_archives
from farm.store.retention.kept import check_kept
from farm.store.rollout_counts import mean_reward, rollout_counts
from farm.store.rollouts import attempts, batches, chunks, instances, rewards, rollouts
from farm.store.sql.clock import db_now

_AS_THEY_ARE = tuple({each.name for each in fields(Rollout)} - {"stage", "state", "outcome", "failure", "segments"})
"""The fields of a rollout that its row has in columns of the same names."""
_OF_REQUEST = ("idempotency_key", "n_samples", "priority", "max_attempts", "max_losses", "quarantine_after", "run")
_OF_INSTANCE = ("data_source", "instance_id", "fields", "archive")
_ID = bindparam("b_id", type_=String)
_CHUNK = 1000
"""Rows written by one statement, so that a huge batch takes no more memory than a small one."""


def create(
    connection: Connection,
    request: BatchRequest,
    fingerprint: str,
    secret_key: SecretKey,
    max_open: int | None = None,
    batch_id: str = "",
    caller: Caller | None = None,
) -> tuple[str, bool]:
    """Write a batch and all its rollouts; return (batch id, whether it is new). The same `batch_id` is written once.

    Raises Conflict if its key belongs to a different request, by fingerprint; Overloaded if then more than `max_open`
    rollouts would be open.
    """
    if batch_id and connection.execute(select(batches.c.batch_id).filter_by(batch_id=batch_id)).first() is not None:
        return batch_id, True
    if request.idempotency_key is not None:
        known = connection.execute(
            select(batches.c.batch_id, batches.c.fingerprint).filter_by(idempotency_key=request.idempotency_key)
        ).one_or_none()
        if known is not None:
            if known.fingerprint != fingerprint:
                raise Conflict(
                    f"idempotency key {request.idempotency_key!r} belongs to batch {known.batch_id} with another "
                    "request: use a new key, or submit the same request"
                )
            return known.batch_id, False
    n_rollouts = len(request.instances) * request.n_samples
    if max_open is not None:
        check_room(connection, n_rollouts, max_open)
    if caller is not None and caller.max_open is not None:
        api_keys.lock(connection, caller.name)
        check_room(connection, n_rollouts, caller.max_open, caller.name)
    _check_archives(connection, request)
    batch_id = batch_id or new_batch_id()
    now = connection.execute(select(db_now())).scalar_one()
    connection.execute(
        insert(batches),
        {
            "batch_id": batch_id,
            **{name: getattr(request, name) for name in _OF_REQUEST},
            "awaits_position": _protocol_of(request.idempotency_key),
            "fingerprint": fingerprint,
            "created_at": now,
            "n_rollouts": n_rollouts,
            "last_seq": 0,
            "submitter": "" if caller is None else caller.name,
            "request": secret_key.seal_request(connection, request.stored(), caller),
        },
    )
    connection.execute(
        insert(instances),
        [
            {
                "batch_id": batch_id,
                "group_index": index,
                **{name: getattr(instance, name) for name in _OF_INSTANCE},
            }
            for index, instance in enumerate(request.instances)
        ],
    )
    rows = _new_rollouts(request, batch_id, now)
    while some := list(islice(rows, _CHUNK)):
        connection.execute(insert(rollouts), some)
    if max_open is not None:
        check_room_again(connection, n_rollouts, max_open)
    return batch_id, True


def needs_engine(connection: Connection, batch_id: str) -> bool:
    """Return whether a batch has rollouts that use the farm's engines. Raises NotFound."""
    stored = request_of(connection, batch_id)
    if stored.get("engine") is not None:
        return False
    n_groups: int = connection.execute(_n_groups(), {"b_id": batch_id}).scalar_one()
    return len(stored.get("engine_of_instance", ())) < n_groups


@cache
def _n_groups() -> Select[Any]:
    return select(func.count(literal(1))).where(instances.c.batch_id == _ID)


def _check_archives(connection: Connection, request: BatchRequest) -> None:
    """Keep the archives that instances name. Raises InvalidRequest for the first missing one."""
    named = {instance.archive: index for index, instance in reversed(list(enumerate(request.instances)))}
    named.pop("", None)
    missing = stored_archives.keep(connection, named) if named else ()
    if missing:
        first = min(missing, key=lambda digest: named[digest])
        raise InvalidRequest(
            f"there is no task archive {first}: upload it by `upload_archive`",
            field=f"instances[{named[first]}].archive",
        )


def _new_rollouts(request: BatchRequest, batch_id: str, now: float) -> Iterator[dict[str, Any]]:
    counts = dict.fromkeys(("n_failures", "n_lost", "n_sends", "n_turns", "n_response_tokens"), 0)
    times = dict.fromkeys(("queued_at", "ready_at", "resend_at", "submitted_at"), now)
    fresh = {"stage": Stage.INIT.value, "state": State.QUEUED.value, "attempt": 1, **counts, **times}
    for group, instance in enumerate(request.instances):
        for sample in range(request.n_samples):
            yield fresh | {
                "rollout_id": rollout_id(batch_id, group, sample),
                "batch_id": batch_id,
                "group_index": group,
                "sample_index": sample,
                "data_source": instance.data_source,
                "instance_id": instance.instance_id,
            }


def has_open(connection: Connection, batch_id: str) -> bool:
    """Return whether a batch has open rollouts; unlike `status` it reads rollouts only if all have ended once.

    Raises NotFound.
    """
    return progress(connection, batch_id)[1]


def progress(connection: Connection, batch_id: str) -> tuple[int, bool]:
    """Return the last end number of a batch, and whether it has open rollouts. Raises NotFound."""
    row = connection.execute(_numbers(), {"b_id": batch_id}).one_or_none()
    if row is None:
        raise NotFound(f"there is no batch {batch_id}")
    if row.last_seq < row.n_rollouts:
        return row.last_seq, True
    return row.last_seq, connection.execute(_live(), {"b_id": batch_id}).first() is not None


# Statements that are read again and again are built once: building one takes longer than reading a small batch.
@cache
def _numbers() -> Select[Any]:
    return select(batches.c.last_seq, batches.c.n_rollouts).where(batches.c.batch_id == _ID)


@cache
def _live() -> Select[Any]:
    return select(literal(1)).where(rollouts.c.batch_id == _ID, rollouts.c.finish_seq.is_(None)).limit(1)


def keyed(connection: Connection, keys: Sequence[str]) -> list[KeyedBatch]:
    """Return the batches with these idempotency keys, in the order of the keys."""
    columns = (batches.c.idempotency_key, batches.c.batch_id, batches.c.n_rollouts, batches.c.n_samples)
    known: dict[str, KeyedBatch] = {}
    for some in chunks(keys):
        statement = select(*columns, batches.c.last_seq, batches.c.request)
        for row in connection.execute(statement.where(batches.c.idempotency_key.in_(some))):
            key = row.idempotency_key
            numbers = (row.n_rollouts, row.n_samples, row.last_seq)
            known[key] = KeyedBatch(key, row.batch_id, *numbers, row.request.get("metadata", {}))
    return [known[key] for key in dict.fromkeys(keys) if key in known]


def request_of(connection: Connection, batch_id: str) -> dict[str, Any]:
    """Return the request of a batch, without its instances. Raises NotFound."""
    row = connection.execute(_request(), {"b_id": batch_id}).one_or_none()
    if row is None:
        raise NotFound(f"there is no batch {batch_id}")
    request: dict[str, Any] = row.request
    return request


@cache
def _request() -> Select[Any]:
    return select(batches.c.request).where(batches.c.batch_id == _ID)


def instance_fields(connection: Connection, batch_id: str, group_index: int) -> tuple[str, dict[str, Any], str]:
    """(data_source, fields, digest of its archive) of one instance. Raises NotFound."""
    row = connection.execute(
        select(instances.c.data_source, instances.c.fields, instances.c.archive).where(
            instances.c.batch_id == batch_id, instances.c.group_index == group_index
        )
    ).one_or_none()
    if row is None:
        raise NotFound(f"batch {batch_id} has no instance {group_index}")
    return row.data_source, row.fields, row.archive


def recent(connection: Connection, limit: int) -> list[str]:
    """Return the ids of the newest batches, newest first."""
    statement = select(batches.c.batch_id).order_by(batches.c.created_at.desc()).limit(limit)
    return list(connection.execute(statement).scalars())


def status(connection: Connection, batch_id: str) -> BatchStatus:
    """Return the progress of a batch in numbers. Raises NotFound."""
    batch = connection.execute(_head(), {"b_id": batch_id}).one_or_none()
    if batch is None:
        raise NotFound(f"there is no batch {batch_id}")
    counts = rollout_counts(connection, [batch_id])
    ended = dict.fromkeys((State.COMPLETED, State.FAILED, State.CANCELLED), 0)
    stages = {stage: {State.QUEUED: 0, State.ACTIVE: 0} for stage in Stage}
    stopped = {stage: {State.FAILED: 0, State.CANCELLED: 0} for stage in Stage}
    failures: dict[str, int] = {}
    for count in counts:
        if count.state in ended:
            ended[count.state] += count.n
        else:
            stages[count.stage][count.state] += count.n
        if count.state in (State.FAILED, State.CANCELLED):
            stopped[count.stage][count.state] += count.n
        if count.state is State.FAILED and count.failure_kind is not None:
            failures[count.failure_kind] = failures.get(count.failure_kind, 0) + count.n
    n_completed = ended[State.COMPLETED]
    return BatchStatus(
        batch_id=batch_id,
        n_rollouts=batch.n_rollouts,
        n_completed=n_completed,
        n_failed=ended[State.FAILED],
        n_cancelled=ended[State.CANCELLED],
        stages=stages,
        failures=failures,
        mean_reward=mean_reward(counts),
        created_at=batch.created_at,
        n_mismatches=sum(count.n_mismatches for count in counts),
        n_invalid_actions=sum(count.n_invalid_actions for count in counts),
        stopped=stopped,
        submitter=batch.submitter,
        findings=tuple(batch[-1] or ()),
    )


@cache
def _head() -> Select[Any]:
    columns = (batches.c.n_rollouts, batches.c.created_at, batches.c.submitter, batches.c.request["findings"])
    return select(*columns).where(batches.c.batch_id == _ID)


def ended_after(connection: Connection, batch_id: str, cursor: int, limit: int) -> list[Rollout]:
    """Return the rollouts of a batch that ended after a cursor, in order of their ends, without their segments."""
    bound = {"b_id": batch_id, "b_cursor": cursor, "b_limit": limit}
    return rollouts_by(connection, _ended_after(), bound)


@cache
def _ended_after() -> Select[Any]:
    after = (rollouts.c.batch_id == _ID, rollouts.c.finish_seq > bindparam("b_cursor"))
    return select(rollouts).where(*after).order_by(rollouts.c.finish_seq).limit(bindparam("b_limit"))


def groups_after(connection: Connection, batch_id: str, cursor: int, limit: int) -> list[list[Rollout]]:
    """Return the complete groups of a batch whose last rollout ended after a cursor, in that order."""
    bound = {"b_id": batch_id, "b_cursor": cursor, "b_limit": limit}
    members = rollouts_by(connection, _groups_after(), bound)
    return [list(group) for _, group in groupby(members, key=lambda each: each.group_index)]


@cache
def _groups_after() -> Select[Any]:
    cursor = bindparam("b_cursor", type_=Integer)
    n_samples = select(batches.c.n_samples).where(batches.c.batch_id == _ID).scalar_subquery()
    # a group that was completed after the cursor has a rollout that ended after it: only such groups are checked
    lately = select(rollouts.c.group_index).where(rollouts.c.batch_id == _ID, rollouts.c.finish_seq > cursor)
    last = func.max(rollouts.c.finish_seq).label("last")
    whole = (
        select(rollouts.c.group_index, last)
        .where(rollouts.c.batch_id == _ID, rollouts.c.group_index.in_(lately), rollouts.c.finish_seq.is_not(None))
        .group_by(rollouts.c.group_index)
        .having(func.count(literal(1)) == n_samples, func.max(rollouts.c.finish_seq) > cursor)
        .order_by(last)
        .limit(bindparam("b_limit"))
        .subquery()
    )
    # one statement, one snapshot: a number assigned in between, to a rescored rollout, would skip others
    return (
        select(rollouts)
        .join(whole, whole.c.group_index == rollouts.c.group_index)
        .where(rollouts.c.batch_id == _ID)
        .order_by(whole.c.last, rollouts.c.sample_index)
    )


def rollouts_of(
    connection: Connection, batch_id: str, after: RolloutRef | None = None, limit: int | None = None
) -> list[Rollout]:
    """Return rollouts of a batch, by group and sample, without segments; at most a page that follows a given one."""
    bound: dict[str, Any] = {"b_id": batch_id}
    if after is not None:
        bound |= {"b_group": after.group_index, "b_sample": after.sample_index}
    if limit is not None:
        bound["b_limit"] = limit
    statement = _rollouts_of(follows=after is not None, limited=limit is not None)
    return rollouts_by(connection, statement, bound)


@cache
def _rollouts_of(*, follows: bool, limited: bool) -> Select[Any]:
    group, sample = rollouts.c.group_index, rollouts.c.sample_index
    statement = select(rollouts).where(rollouts.c.batch_id == _ID).order_by(group, sample)
    if follows:
        b_group = bindparam("b_group", type_=Integer)
        statement = statement.where((group > b_group) | (group == b_group) & (sample > bindparam("b_sample")))
    return statement.limit(bindparam("b_limit")) if limited else statement


def rollout(connection: Connection, rollout_id: str) -> Rollout:
    """Return one rollout, without its segments. Raises NotFound."""
    matches = rollouts_by(connection, select(rollouts).where(rollouts.c.rollout_id == rollout_id))
    if not matches:
        raise NotFound(f"there is no rollout {rollout_id}")
    return matches[0]


def timings(connection: Connection, rollout_id: str) -> list[Timing]:
    """Return every stage of every attempt of a rollout, in order. Raises Pruned."""
    statement = select(attempts).where(attempts.c.rollout_id == rollout_id)
    order = list(Stage)
    timings = [
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
    if not timings:
        check_kept(connection, RolloutRef.of(rollout_id).batch_id)
    return sorted(timings, key=lambda timing: (timing.attempt, order.index(timing.stage)))


def rewards_of(connection: Connection, rollout_id: str) -> list[Reward]:
    """Return the scores of a rollout, newest last."""
    rows = connection.execute(select(rewards).filter_by(rollout_id=rollout_id).order_by(rewards.c.attempt))
    return [Reward(row.value, row.details, row.evaluator, row.created_at, row.rewards) for row in rows]


def with_segments(rollouts: Sequence[Rollout], segments: dict[str, tuple[Segment, ...]]) -> list[Rollout]:
    """Return the same rollouts with their training rows."""
    return [replace(each, segments=segments.get(each.rollout_id, ())) for each in rollouts]


def rollouts_by(
    connection: Connection, statement: Select[Any], bound: Mapping[str, Any] | None = None
) -> list[Rollout]:
    """Return the rollouts of a statement that selects all columns, without their segments."""
    return [rollout_record(row) for row in connection.execute(statement, bound)]


def rollout_record(row: Row[Any]) -> Rollout:
    """Return the rollout of a row with all columns of the table."""
    return Rollout(
        **{name: getattr(row, name) for name in _AS_THEY_ARE},
        stage=Stage(row.stage),
        state=State(row.state),
        outcome=Outcome(row.outcome) if row.outcome else None,
        failure=Failure(row.failure_kind, row.failure_message or "") if row.failure_kind else None,
    )


def _protocol_of(idempotency_key: str | None) -> str | None:
    """Return the key prefix of a protocol's batch, such as `agent-lightning:`; None for batches of no protocol."""
    name, colon, _ = (idempotency_key or "").partition(":")
    return f"{name}:" if colon and len(name) < 64 else None
