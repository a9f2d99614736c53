"""Leader election by a lease in the database, for work that only one process of the farm does at a time.

A claim is a role, too. It is held as long as its owner's lease, which is the role of the owner's name: a process renews
one lease for any number of claims, and all of them are free once it has ended.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from farm.store.sql.clock import db_now, due
from farm.store.sql.schema import LeaderRow

leaders = LeaderRow.__table__

CLAIM_KEPT_S = 86_400.0
"""Seconds that an unheld claim is remembered."""


@dataclass(frozen=True, slots=True)
class ClaimedRole:
    """A claim and its owner, "" once released. `lease_end` is the end of the owner's lease, None if it has ended."""

    role: str
    owner: str
    lease_end: float | None

    @property
    def is_held(self) -> bool:
        return self.lease_end is not None


def acquire_leadership(connection: Connection, role: str, owner: str, lease_s: float) -> bool:
    """Become or stay the leader of `role`, for `lease_s` more. False if another leads.

    It waits for no lock: if another process is taking the lease at this moment, this one does not get it.
    """
    free = due(leaders.c.expires_at, 2 * lease_s)
    available = select(leaders.c.role).where(leaders.c.role == role, (leaders.c.owner == owner) | free)
    claim = (
        update(leaders)
        .where(leaders.c.role.in_(available.with_for_update(skip_locked=True, key_share=True)))
        .values(owner=owner, expires_at=db_now() + lease_s)
    )
    if connection.execute(claim).rowcount:
        return True
    held = select(leaders.c.owner, free.label("free")).where(leaders.c.role == role)
    row = connection.execute(held).one_or_none()
    if row is not None:
        return bool(row.owner == owner and not row.free)
    try:
        with connection.begin_nested():
            connection.execute(insert(leaders).values(role=role, owner=owner, expires_at=db_now() + lease_s))
    except IntegrityError:  # another process became leader at the same moment
        return False
    return True


def is_led_by_other(connection: Connection, role: str, owner: str, lease_s: float) -> bool:
    """Return whether another leads; a read, which is all that a standby does."""
    others = (leaders.c.role == role, leaders.c.owner != owner, ~due(leaders.c.expires_at, 2 * lease_s))
    return connection.execute(select(leaders.c.owner).where(*others)).first() is not None


def release_leadership(connection: Connection, role: str, owner: str) -> None:
    """Give up leadership, so that another can lead at once."""
    connection.execute(delete(leaders).where(leaders.c.role == role, leaders.c.owner == owner))


def claims_of(connection: Connection, begin: str, lease_s: float) -> list[ClaimedRole]:
    """Return the claims whose roles have this prefix."""
    return _claims(connection, leaders.c.role.startswith(begin, autoescape=True), lease_s)


def claims_named(connection: Connection, roles: Collection[str], lease_s: float) -> list[ClaimedRole]:
    """Return the existing claims of these roles."""
    return _claims(connection, leaders.c.role.in_(roles), lease_s)


def _claims(connection: Connection, condition: ColumnElement[bool], lease_s: float) -> list[ClaimedRole]:
    leases = leaders.alias()
    ended = due(leases.c.expires_at, 2 * lease_s).label("ended")
    joined = select(leaders.c.role, leaders.c.owner, leases.c.expires_at, ended).join(
        leases, leases.c.role == leaders.c.owner, isouter=True
    )
    rows = connection.execute(joined.where(condition).order_by(leaders.c.role))
    return [ClaimedRole(row.role, row.owner, None if row.ended in (None, True) else row.expires_at) for row in rows]


def add_claim(connection: Connection, role: str, owner: str) -> None:
    """Create an unclaimed role's claim."""
    values = {"role": role, "owner": owner, "expires_at": db_now() + CLAIM_KEPT_S}
    connection.execute(insert(leaders).values(values))


def pass_claim(connection: Connection, role: str, owner: str, to: str) -> bool:
    """Pass a claim to another owner, "" for nobody. False if its owner has changed, or it was dropped."""
    held = (leaders.c.role == role, leaders.c.owner == owner)
    passed = update(leaders).where(*held).values(owner=to, expires_at=db_now() + CLAIM_KEPT_S)
    return bool(connection.execute(passed).rowcount)


def drop_claim(connection: Connection, role: str, owner: str) -> bool:
    """Delete a claim. False if its owner has changed, or it was dropped."""
    return bool(connection.execute(delete(leaders).where(leaders.c.role == role, leaders.c.owner == owner)).rowcount)


def forget_ended(connection: Connection) -> None:
    """Delete claims that were released, and leases that ended, long ago."""
    connection.execute(delete(leaders).where(due(leaders.c.expires_at + CLAIM_KEPT_S, 3 * CLAIM_KEPT_S)))
