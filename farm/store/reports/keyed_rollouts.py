"""Rollouts of batches of one whose idempotency keys share a prefix, with the metadata of their submit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import Connection, Select, Table, and_, bindparam, func, insert, select, update

from farm.records.rollout import Rollout
from farm.store.batches import rollout_record
from farm.store.consumers import deliveries
from farm.store.rollouts import batches, rollouts
from farm.store.sql.terminal_table import TerminalPlaceRow

Described = tuple[dict[str, Any], Rollout]
places = cast(Table, TerminalPlaceRow.__table__)


def shown(connection: Connection, prefix: str, consumer: str) -> list[Described]:
    """Return those that a consumer has not acknowledged, oldest first."""
    statement = _joined(prefix, consumer).where(deliveries.c.cursor.is_(None)).order_by(batches.c.created_at)
    return [(row.request.get("metadata", {}), rollout_record(row)) for row in connection.execute(statement)]


def any_unplaced(connection: Connection, prefix: str) -> bool:
    """Return whether `place_ended` would find any; a read, so that a client that polls writes nothing."""
    return connection.execute(_unplaced(prefix).limit(1)).first() is not None


def place_ended(connection: Connection, prefix: str) -> int:
    """Assign places to ended rollouts without one, after all others, in the order of their ends; return how many.

    A rollout that is committed late gets a later place, and is not skipped. Raises IntegrityError if another process
    assigns these places at the same moment: then they have them.
    """
    found = connection.execute(_unplaced(prefix)).scalars().all()
    last = _last_place(connection, prefix)
    rows = [{"protocol": prefix, "place": n, "batch_id": each} for n, each in enumerate(found, last + 1)]
    if rows:
        connection.execute(insert(places), rows)
        placed = update(batches).where(batches.c.batch_id == bindparam("placed"))
        connection.execute(placed.values(awaits_place=None), [{"placed": each} for each in found])
    return len(rows)


def ended(
    connection: Connection, prefix: str, consumer: str, after: int, limit: int
) -> tuple[Sequence[tuple[dict[str, Any], Rollout, bool]], int, int]:
    """Return the rollouts after a place, in order of places, each with whether a consumer acknowledged it.

    Also returns the place of the last of them, `after` if there is none, and the last place of all.
    """
    mine = and_(places.c.batch_id == batches.c.batch_id, places.c.protocol == prefix)
    joined = _joined(prefix, consumer).add_columns(places.c.place).join(places, mine)
    ordered = joined.where(places.c.place > after).order_by(places.c.place)
    rows = connection.execute(ordered.limit(limit)).all()
    described = [(row.request.get("metadata", {}), rollout_record(row), row.cursor is not None) for row in rows]
    return described, rows[-1].place if rows else after, _last_place(connection, prefix)


def _last_place(connection: Connection, prefix: str) -> int:
    last = select(func.max(places.c.place)).where(places.c.protocol == prefix)
    return connection.execute(last).scalar_one() or 0


def _unplaced(prefix: str) -> Select[Any]:
    statement = select(batches.c.batch_id).join(rollouts, _same_batch)
    chosen = statement.where(batches.c.awaits_place == prefix, rollouts.c.finished_at.is_not(None))
    return chosen.order_by(rollouts.c.finished_at, rollouts.c.rollout_id)


_same_batch = rollouts.c.batch_id == batches.c.batch_id


def _of(prefix: str) -> Any:
    return batches.c.idempotency_key.startswith(prefix, autoescape=True)


def _joined(prefix: str, consumer: str) -> Select[Any]:
    acknowledged = and_(deliveries.c.batch_id == batches.c.batch_id, deliveries.c.consumer == consumer)
    columns = (rollouts, batches.c.request, deliveries.c.cursor)
    statement = select(*columns).join(batches, _same_batch).outerjoin(deliveries, acknowledged)
    return statement.where(_of(prefix))
