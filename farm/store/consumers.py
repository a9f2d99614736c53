"""Acknowledgements of each consumer of a batch: a cursor that only ever grows.

Rollouts are numbered as they end, in the order of commits, so one number says which of them a consumer has dealt with.
Rollouts that it did not acknowledge are delivered again: delivery is at least once.
"""

from __future__ import annotations

from typing import cast

from sqlalchemy import Connection, Table, insert, select, update

from farm.errors import InvalidRequest, NotFound
from farm.store.rollouts import batches
from farm.store.sql.clock import db_now
from farm.store.sql.schema import DeliveryRow

deliveries = cast(Table, DeliveryRow.__table__)


def acknowledge(connection: Connection, batch_id: str, consumer: str, cursor: int) -> int:
    """Note that a consumer has dealt with all that ended up to a cursor; the furthest that it acknowledged so far.

    Raises NotFound if there is no such batch, InvalidRequest if nothing ended there with that number.
    """
    # of one consumer that acknowledges twice at once, the second waits here
    batch = update(batches).where(batches.c.batch_id == batch_id).values(last_seq=batches.c.last_seq)
    last = connection.execute(batch.returning(batches.c.last_seq)).scalar_one_or_none()
    if last is None:
        raise NotFound(f"there is no batch {batch_id}")
    if not 0 <= cursor <= last:
        raise InvalidRequest(f"{cursor} was never given out; batch {batch_id} is at {last}", field="cursor")
    mine = (deliveries.c.batch_id == batch_id, deliveries.c.consumer == consumer)
    known = connection.execute(select(deliveries.c.cursor).where(*mine)).scalar_one_or_none()
    if known is None:
        row = {"batch_id": batch_id, "consumer": consumer, "cursor": cursor}
        connection.execute(insert(deliveries).values(acknowledged_at=db_now(), **row))
    elif known < cursor:
        connection.execute(update(deliveries).where(*mine).values(cursor=cursor, acknowledged_at=db_now()))
    return max(cursor, known or 0)


def acknowledged(connection: Connection, batch_id: str, consumer: str) -> int:
    """Return the cursor of a consumer; 0 if it has acknowledged nothing."""
    mine = (deliveries.c.batch_id == batch_id, deliveries.c.consumer == consumer)
    return connection.execute(select(deliveries.c.cursor).where(*mine)).scalar_one_or_none() or 0
