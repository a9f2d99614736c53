"""Keys of the API: named, with scopes and quotas, and hashed, so that the database gives no key away.

A key is random and long, so that its plain SHA-256 cannot be guessed back, and looking it up tells nobody's time
anything about another one.
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
    """Return what is stored of a key's text."""
    return hashlib.sha256(text).hexdigest()


def add(connection: Connection, key: ApiKey, digest: str) -> None:
    """Keep a new key. Raises Conflict if there is another one of its name."""
    known = connection.execute(select(keys.c.digest).where(keys.c.name == key.name)).scalar_one_or_none()
    if known == digest:
        return
    if known is not None:
        raise Conflict(f"there is a key {key.name!r} already: take another name, or revoke that one first")
    values = {name: getattr(key, name) for name in ("name", "max_open", "max_engines", "max_rate", "created_by")}
    scopes = [scope.value for scope in key.scopes]
    connection.execute(insert(keys).values(**values, scopes=scopes, digest=digest, created_at=db_now()))


def lock(connection: Connection, name: str) -> None:
    """Have all that a quota of this key is checked for go one after the other. Raises Forbidden if it was revoked."""
    row = select(keys.c.name).where(keys.c.name == name).with_for_update()
    if connection.execute(row).first() is None:
        raise Forbidden(f"key {name!r} was revoked")


def revoke(connection: Connection, name: str) -> bool:
    """Take a key from those that count. False if there was none of that name."""
    return is_plain(name) and connection.execute(delete(keys).where(keys.c.name == name)).rowcount == 1


def listing(connection: Connection) -> list[ApiKey]:
    """Return all keys by name."""
    return [_key(row) for row in connection.execute(select(keys).order_by(keys.c.name))]


def by_digest(connection: Connection) -> dict[str, ApiKey]:
    """Return all keys by what is stored of their texts."""
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
