"""API keys: named, with scopes and quotas, and stored as hashes, so that a leaked database reveals no key.

A key is long and random. So a plain SHA-256 is enough: it cannot be reversed by guessing, and the time of a lookup
reveals nothing about other keys.
"""

from __future__ import annotations

import hashlib
from typing import Any, cast

from sqlalchemy import Connection, Row, Table, delete, insert, select

from farm.callers import ApiKey, Scope
from farm.errors import Conflict, Forbidden
from farm.store.sql.clock import db_now
from farm.store.sql.sanitize import is_plain
from farm.store.sql.schema import ApiKeyRow

keys = cast(Table, ApiKeyRow.__table__)


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
    values = {name: getattr(key, name) for name in ("name", "max_open", "max_engines", "max_rate", "created_by")}
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
    return ApiKey(
        row.name,
        tuple(Scope(scope) for scope in row.scopes),
        max_open=row.max_open,
        max_engines=row.max_engines,
        max_rate=row.max_rate,
        created_by=row.created_by,
        created_at=row.created_at,
    )
