"""The acknowledgements of each consumer of a batch, a cursor that only grows, and the recorded steps of training runs.

Rollouts are numbered as they end, in the order of commits, so one number says how far a consumer has come. Rollouts
that it did not acknowledge are delivered again: delivery is at least once.

A training run records each step once, before it gets the step's groups; a repeated request gets the same groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Connection, Select, bindparam, func, insert, select, update

from farm.errors import Conflict, InvalidRequest, NotFound
from farm.ids import RolloutRef
from farm.records.request import Instance
from farm.records.training_run import RecordedStep, check_own_key
from farm.store.batches import request_of
from farm.store.rollouts import batches, instances
from farm.store.sql.clock import db_now
from farm.store.sql.schema import CollectedStepRow, DeliveryRow

deliveries = DeliveryRow.__table__
steps = CollectedStepRow.__table__


def acknowledge(connection: Connection, batch_id: str, consumer: str, cursor: int) -> int:
    """Move a consumer's cursor on; return its furthest cursor so far.

    Raises NotFound without such a batch, InvalidRequest for a cursor beyond the batch's last number.
    """
    # two acknowledgements of one consumer at the same time take turns here
    batch = update(batches).where(batches.c.batch_id == batch_id).values(last_seq=batches.c.last_seq)
    last = connection.execute(batch.returning(batches.c.last_seq)).scalar_one_or_none()
    if last is None:
        raise NotFound(f"there is no batch {batch_id}")
    if not 0 <= cursor <= last:
        raise InvalidRequest(f"{cursor} was never assigned as a cursor; batch {batch_id} is at {last}", field="cursor")
    own = (deliveries.c.batch_id == batch_id, deliveries.c.consumer == consumer)
    earlier = connection.execute(select(deliveries.c.cursor).where(*own)).scalar_one_or_none()
    if earlier is None:
        row = {"batch_id": batch_id, "consumer": consumer, "cursor": cursor}
        connection.execute(insert(deliveries).values(acknowledged_at=db_now(), **row))
    elif earlier < cursor:
        connection.execute(update(deliveries).where(*own).values(cursor=cursor, acknowledged_at=db_now()))
    return max(cursor, earlier or 0)


def acknowledged(connection: Connection, batch_id: str, consumer: str) -> int:
    """Return the cursor of a consumer; 0 if it has acknowledged nothing."""
    bound = {"b_id": batch_id, "b_consumer": consumer}
    return connection.execute(_cursor(), bound).scalar_one_or_none() or 0


@cache
def _cursor() -> Select[Any]:
    own = (deliveries.c.batch_id == bindparam("b_id"), deliveries.c.consumer == bindparam("b_consumer"))
    return select(deliveries.c.cursor).where(*own)


def instances_of(connection: Connection, group_ids: Sequence[str]) -> list[Instance]:
    """Return the instances that groups were submitted with, in this order.

    Raises NotFound; InvalidRequest for one that has an engine key of its own.
    """
    submitted = []
    for each in group_ids:
        ref = RolloutRef.of(each)
        where = (instances.c.batch_id == ref.batch_id, instances.c.group_index == ref.group_index)
        row = connection.execute(select(instances).where(*where)).one_or_none()
        if row is None:
            raise NotFound(f"there is no group {each}")
        values = {name: getattr(row, name) for name in ("data_source", "instance_id", "fields", "archive")}
        request = request_of(connection, ref.batch_id)
        number = request.get("engine_of_instance", {}).get(str(ref.group_index))
        engine = {} if number is None else request["engines"][number]
        check_own_key(row.instance_id, engine.get("engine_key", ""))
        submitted.append(Instance(**values, **engine))
    return submitted


def record_step(connection: Connection, run: str, step: int, record: Mapping[str, Any]) -> RecordedStep:
    """Record a step, unless it is recorded. Returns the record in the store.

    Raises Conflict if a later step is recorded and this one is not, and IntegrityError if another process records it at
    the same moment: then it can be read.
    """
    known = connection.execute(select(steps.c.record).where(steps.c.run == run, steps.c.step == step)).one_or_none()
    if known is not None:
        return RecordedStep(run, step, known.record)
    newest = connection.execute(select(func.max(steps.c.step)).where(steps.c.run == run)).scalar_one()
    if newest is not None and newest > step:
        raise Conflict(f"run {run} has already recorded step {newest}: step {step} can no longer be recorded")
    connection.execute(insert(steps).values(run=run, step=step, record=dict(record), created_at=db_now()))
    return RecordedStep(run, step, dict(record))


def recorded_step(connection: Connection, run: str, up_to: int | None = None) -> RecordedStep | None:
    """Return a run's newest recorded step, up to step `up_to` if given; None without one."""
    statement = select(steps.c.step, steps.c.record).where(steps.c.run == run)
    if up_to is not None:
        statement = statement.where(steps.c.step <= up_to)
    row = connection.execute(statement.order_by(steps.c.step.desc()).limit(1)).one_or_none()
    return None if row is None else RecordedStep(run, row.step, row.record)
