"""API keys: named, with scopes and quotas, and stored as hashes, so that a leaked database reveals no key.

A key is long and random. So a plain SHA-256 is enough: it cannot be reversed by guessing, and the time of a lookup
reveals nothing about other keys.

The limits on open rollouts, of each key and of the whole farm, are here, too.
"""

from __future__ import annotations

import hashlib
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select

from farm.callers import ApiKey, Caller, Scope
from farm.errors import Conflict, Forbidden, InvalidRequest, NotFound, Overloaded
from farm.store.locks import lock_room
from farm.store.rollouts import batches
from farm.store.sql.clock import db_now
from farm.store.sql.sanitize import is_plain
from farm.store.sql.schema import ApiKeyRow

keys = ApiKeyRow.__table__
_AS_THEY_ARE = ("name", "max_open", "max_engines", "max_rate", "created_by")


def digest_of(text: bytes) -> str:
    """Return the stored form of a key's text."""
    return hashlib.sha256(text).hexdigest()


def add(connection: Connection, key: ApiKey, digest: str) -> None:
    """Store a new key. Raises Conflict if its name is taken."""
    known = connection.execute(select(keys.c.digest).where(keys.c.name == key.name)).scalar_one_or_none()
    if known == digest:
        return
    if known is not None:
        raise Conflict(f"key {key.name!r} already exists: choose another name, or revoke that key first")
    values = {name: getattr(key, name) for name in _AS_THEY_ARE}
    scopes = [scope.value for scope in key.scopes]
    connection.execute(insert(keys).values(**values, scopes=scopes, digest=digest, created_at=db_now()))


def lock(connection: Connection, name: str) -> None:
    """Serialize the transactions that check a quota of this key. Raises Forbidden if it was revoked."""
    row = select(keys.c.name).where(keys.c.name == name).with_for_update()
    if connection.execute(row).first() is None:
        raise Forbidden(f"key {name!r} was revoked")


def revoke(connection: Connection, name: str) -> bool:
    """Remove a key. False if there was none of that name."""
    return is_plain(name) and connection.execute(delete(keys).where(keys.c.name == name)).rowcount == 1


def listing(connection: Connection) -> list[ApiKey]:
    """Return all keys by name."""
    return [_key(row) for row in connection.execute(select(keys).order_by(keys.c.name))]


def by_digest(connection: Connection) -> dict[str, ApiKey]:
    """Return all keys by their stored form."""
    return {row.digest: _key(row) for row in connection.execute(select(keys))}


def _key(row: Row[Any]) -> ApiKey:
    values = {name: getattr(row, name) for name in _AS_THEY_ARE}
    return ApiKey(**values, scopes=tuple(map(Scope, row.scopes)), created_at=row.created_at)


def check_room(connection: Connection, n_new: int, most: int, submitter: str = "", n_written: int = 0) -> None:
    """Check that `n_new` more rollouts leave at most `most` open, of all submitters or of one.

    Raises InvalidRequest if the new ones exceed the limit by themselves, else Overloaded. `n_written` of the new ones
    are in the store already.
    """
    who, setting = (f"key {submitter!r}", "its quota") if submitter else ("the farm", "FARM_MAX_OPEN")
    if n_new > most:
        raise InvalidRequest(
            f"{n_new} rollouts in a batch exceed the limit of {who}, {most}: submit several batches, or set {setting}",
            field="instances",
        )
    n_now = n_open(connection, submitter) - n_written
    if n_now + n_new > most:
        raise Overloaded(
            f"{n_now} rollouts are open; {n_new} more would exceed {most}, the limit of {who}: "
            f"submit again when some have ended, or set {setting}"
        )


def check_room_again(connection: Connection, n_written: int, most: int) -> None:
    """Raise Overloaded if with the `n_written` rollouts of this transaction more than `most` are open.

    Others may have written since the first check. The lock is taken only for this second check, because writing takes
    long.
    """
    if lock_room(connection, "rollouts"):
        check_room(connection, n_written, most, n_written=n_written)


def n_open(connection: Connection, submitter: str = "") -> int:
    """Return the open rollouts of all batches or of one submitter, without those that are scored again."""
    left = batches.c.n_rollouts - batches.c.last_seq
    chosen = [left > 0, *([batches.c.submitter == submitter] if submitter else [])]
    return int(connection.execute(select(func.coalesce(func.sum(left), 0)).where(*chosen)).scalar_one())


def check_own(connection: Connection, caller: Caller, batch_id: str) -> None:
    """Raise Forbidden unless the caller submitted the batch or has `operate`. Raises NotFound."""
    if caller.may(Scope.OPERATE):
        return
    statement = select(batches.c.submitter).where(batches.c.batch_id == batch_id)
    submitter = connection.execute(statement).scalar_one_or_none()
    if submitter is None:
        raise NotFound(f"there is no batch {batch_id}")
    if submitter != caller.name:
        raise Forbidden(f"{submitter!r} submitted batch {batch_id}; key {caller.name!r} may only change its own")
