"""The lock order of all transactions: batches by id first, then rollouts by id.

Two transactions that lock several rows in different orders wait for each other until Postgres ends one of them, a
second later. So a change of more than one batch or rollout locks them here first, because an UPDATE of many rows locks
them in the order in which it finds them. SQLite has one writer at a time and needs no order. Heartbeats wait for no
lock: they skip locked rows.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from zlib import crc32

from sqlalchemy import ColumnElement, Connection, bindparam, collate, func, select

from farm.store.rollouts import batches, rollouts

_POSTGRES = "postgresql"
# in Python's sort order, whatever the collation of the database
_batches = (
    select(batches.c.batch_id)
    .where(batches.c.batch_id.in_(bindparam("b_ids", expanding=True)))
    .order_by(collate(batches.c.batch_id, "C"))
    .with_for_update(key_share=True)
)


def lock_batches(connection: Connection, batch_ids: Collection[str]) -> None:
    """Lock these batches until the transaction ends: no other transaction ends one of their rollouts before."""
    if batch_ids and connection.dialect.name == _POSTGRES:
        connection.execute(_batches, {"b_ids": sorted(batch_ids)}).all()


def lock_room(connection: Connection, of: str) -> bool:
    """Serialize the transactions that check a limit of the whole farm.

    Returns whether others may have written since the transaction began.
    """
    if connection.dialect.name != _POSTGRES:
        return False
    connection.execute(select(func.pg_advisory_xact_lock(crc32(of.encode()))))
    return True


def lock_rollouts(connection: Connection, *conditions: ColumnElement[bool] | Any) -> None:
    """Lock these rollouts until the transaction ends."""
    if connection.dialect.name == _POSTGRES:
        some = select(rollouts.c.rollout_id).where(*conditions).order_by(collate(rollouts.c.rollout_id, "C"))
        connection.execute(some.with_for_update(key_share=True)).all()
