"""Leader election by a lease in the database, for work that one process of the farm does at a time."""

from __future__ import annotations

from typing import cast

from sqlalchemy import Connection, Table, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from farm.store.sql.clock import db_now, due
from farm.store.sql.schema import LeaderRow

leaders = cast(Table, LeaderRow.__table__)


def acquire_leadership(connection: Connection, role: str, owner: str, lease_s: float) -> bool:
    """Become or stay the leader of `role`, for `lease_s` more. False if another leads.

    It waits for no lock: a lease that another is taking at this moment is not taken.
    """
    free = due(leaders.c.expires_at, 2 * lease_s)
    mine = select(leaders.c.role).where(leaders.c.role == role, (leaders.c.owner == owner) | free)
    taken = (
        update(leaders)
        .where(leaders.c.role.in_(mine.with_for_update(skip_locked=True, key_share=True)))
        .values(owner=owner, expires_at=db_now() + lease_s)
    )
    if connection.execute(taken).rowcount:
        return True
    held = select(leaders.c.owner, free.label("free")).where(leaders.c.role == role)
    row = connection.execute(held).one_or_none()
    if row is not None:
        return bool(row.owner == owner and not row.free)
    try:
        with connection.begin_nested():
            connection.execute(insert(leaders).values(role=role, owner=owner, expires_at=db_now() + lease_s))
    except IntegrityError:  # another began to lead at the same moment
        return False
    return True


def is_led_by_other(connection: Connection, role: str, owner: str, lease_s: float) -> bool:
    """Return whether another leads: a read, which is all that a standby does."""
    others = (leaders.c.role == role, leaders.c.owner != owner, ~due(leaders.c.expires_at, 2 * lease_s))
    return connection.execute(select(leaders.c.owner).where(*others)).first() is not None


def release_leadership(connection: Connection, role: str, owner: str) -> None:
    """Give up leadership, so that another can lead at once."""
    connection.execute(delete(leaders).where(leaders.c.role == role, leaders.c.owner == owner))
