"""Annotations: values that trainers wrote about rollouts. They are never changed, and deleted with their rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from sqlalchemy import Connection, Row, and_, insert, select

from farm.callers import Caller
from farm.errors import Conflict, InvalidRequest, NotFound
from farm.ids import RolloutRef
from farm.records.rollout import State
from farm.records.scoring.annotation import Annotation, NewAnnotation, NewAnnotations
from farm.store.access.api_keys import check_own
from farm.store.rollouts import chunks, rollouts
from farm.store.sql.clock import db_now
from farm.store.sql.schema import AnnotationRow, SegmentRow

annotation_rows = AnnotationRow.__table__
_segments = SegmentRow.__table__

_WHOLE = -1
"""The row number of a value about the whole rollout, because a primary key cannot be null."""
_Key: TypeAlias = tuple[str, str, int]
"""Rollout, name and row of a value of one producer's step."""


def write(connection: Connection, new: NewAnnotations, caller: Caller) -> int:
    """Store annotations, all or none; return how many were new.

    Raises NotFound for a rollout that does not exist, InvalidRequest for one that has not ended or if the number of
    token values differs from the row's tokens, Conflict for one that was written with another value, and Forbidden for
    rollouts of another key.
    """
    by_key = _by_key(new)
    ids = sorted({each.rollout_id for each in new.annotations})
    for batch_id in sorted({RolloutRef.of(id).batch_id for id in ids}):
        check_own(connection, caller, batch_id)
    _check_ended(connection, ids)
    _check_rows(connection, by_key)
    known = {
        (row.rollout_id, row.name, row.row): row
        for some in chunks(ids)
        for row in connection.execute(
            select(annotation_rows).where(
                annotation_rows.c.rollout_id.in_(some),
                annotation_rows.c.producer == new.producer,
                annotation_rows.c.step == new.step,
            )
        )
    }
    for key in by_key.keys() & known.keys():
        _check_same(known[key], by_key[key], new)
    added = [each for key, each in by_key.items() if key not in known]
    # one statement with many rows, so that all have the same time
    now = connection.execute(select(db_now())).scalar_one()
    for part in chunks(added):
        connection.execute(insert(annotation_rows), [_values(each, new, now) for each in part])
    return len(added)


def listing(connection: Connection, rollout_ids: Sequence[str]) -> Sequence[Annotation]:
    """Return the annotations of rollouts, in the order they were written."""
    statement = (
        select(annotation_rows)
        .where(annotation_rows.c.rollout_id.in_(rollout_ids))
        .order_by(
            *(annotation_rows.c[name] for name in ("created_at", "rollout_id", "producer", "step", "name", "row"))
        )
    )
    return [_annotation(row) for row in connection.execute(statement)]


def _by_key(new: NewAnnotations) -> dict[_Key, NewAnnotation]:
    by_key: dict[_Key, NewAnnotation] = {}
    for index, each in enumerate(new.annotations):
        key = (each.rollout_id, each.name, _WHOLE if each.row is None else each.row)
        if key in by_key:
            raise InvalidRequest("the name appears twice for one rollout and row", field=f"annotations[{index}].name")
        by_key[key] = each
    return by_key


def _check_ended(connection: Connection, ids: Sequence[str]) -> None:
    columns = (rollouts.c.rollout_id, rollouts.c.state)
    states: dict[str, str] = {}
    for some in chunks(ids):
        rows = connection.execute(select(*columns).where(rollouts.c.rollout_id.in_(some)))
        states |= dict(iter(rows.tuples()))
    for each in ids:
        if each not in states:
            raise NotFound(f"there is no rollout {each}")
        if states[each] != State.COMPLETED:
            raise InvalidRequest(
                f"rollout {each} is {states[each]}: annotate it once it is completed", field="rollout_id"
            )


def _check_rows(connection: Connection, by_key: dict[_Key, NewAnnotation]) -> None:
    """Check that rows exist, and have as many response tokens as the annotations have values."""
    wanted = sorted({(id, row) for id, _, row in by_key if row != _WHOLE})
    lengths: dict[tuple[str, int], int] = {}
    for some in chunks(sorted({id for id, _ in wanted})):
        statement = select(_segments.c.rollout_id, _segments.c.segment_index, _segments.c.response_mask)
        for rollout_id, index, mask in connection.execute(statement.where(_segments.c.rollout_id.in_(some))).tuples():
            lengths[rollout_id, index] = len(mask)
    for (rollout_id, name, row), each in by_key.items():
        if row == _WHOLE:
            continue
        n = lengths.get((rollout_id, row))
        if n is None:
            raise InvalidRequest(f"rollout {rollout_id} has no training row {row}", field="row")
        if each.tokens is not None and len(each.tokens) != n:
            raise InvalidRequest(
                f"{name} has {len(each.tokens)} numbers, but the response of row {row} of {rollout_id} has {n} tokens",
                field="tokens",
            )


def _check_same(row: Row[Any], each: NewAnnotation, new: NewAnnotations) -> None:
    same_tokens = (row.tokens is None) == (each.tokens is None) and (
        each.tokens is None or np.array_equal(row.tokens, each.tokens, equal_nan=True)
    )
    if row.value != each.value or not same_tokens:
        raise Conflict(
            f"{new.producer} has already written {each.name} of {each.rollout_id} for step {new.step} with another "
            "value: use another step or another name"
        )


def _values(each: NewAnnotation, new: NewAnnotations, now: float) -> dict[str, Any]:
    row = _WHOLE if each.row is None else each.row
    key = {"rollout_id": each.rollout_id, "name": each.name, "producer": new.producer, "step": new.step, "row": row}
    return key | {"value": each.value, "tokens": each.tokens, "created_at": now}


def _annotation(row: Row[Any]) -> Annotation:
    index = None if row.row == _WHOLE else row.row
    return Annotation(row.rollout_id, row.name, row.producer, row.step, row.value, index, row.tokens, row.created_at)


def of_tokens(rollout_ids: Sequence[str]) -> Any:
    """Return the condition for values by token of rollouts, which are pruned with their training rows."""
    return and_(annotation_rows.c.rollout_id.in_(rollout_ids), annotation_rows.c.tokens.is_not(None))
