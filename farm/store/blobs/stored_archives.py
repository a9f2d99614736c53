"""Task archives: stored in compressed parts under their digest, and dropped when no batch uses them any more."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import zstandard
from sqlalchemy import Connection, delete, insert, select, update

from farm.store.rollouts import chunks, instances
from farm.store.sql.clock import age_of, db_now
from farm.store.sql.schema import ArchivePartRow, ArchiveRow

archives = ArchiveRow.__table__
parts = ArchivePartRow.__table__

KEPT_S = 86_400.0
"""Seconds that an unused archive is kept after its last upload, and a part of an incomplete archive."""


def state(connection: Connection, digest: str) -> tuple[int | None, Sequence[int]]:
    """Return the number of parts of a complete archive, None if it is incomplete, and the numbers of stored parts."""
    n_parts = connection.execute(select(archives.c.n_parts).filter_by(digest=digest)).scalar()
    numbers = select(parts.c.number).where(parts.c.digest == digest).order_by(parts.c.number)
    return n_parts, list(connection.execute(numbers).scalars())


def put_part(connection: Connection, digest: str, number: int, data: bytes, n_bytes: int) -> None:
    """Store a part, `artefacts.packed`, unless it exists or its archive is complete."""
    if connection.execute(select(archives.c.digest).filter_by(digest=digest)).first() is not None:
        return
    key = {"digest": digest, "number": number}
    row: dict[str, Any] = {"data": data, "n_bytes": n_bytes, "uploaded_at": db_now()}
    if connection.execute(update(parts).filter_by(**key).values(**row)).rowcount == 0:
        connection.execute(insert(parts).values(**key, **row))


def part(connection: Connection, digest: str, number: int) -> bytes | None:
    """Return the bytes of a part; None if it does not exist."""
    row = connection.execute(select(parts.c.data, parts.c.n_bytes).filter_by(digest=digest, number=number)).first()
    return None if row is None else zstandard.ZstdDecompressor().decompress(row.data, max_output_size=row.n_bytes)


def complete(connection: Connection, digest: str, n_parts: int, n_bytes: int) -> None:
    """Mark an archive as complete, or as uploaded again."""
    if not keep(connection, [digest]):
        return
    row: dict[str, Any] = {"n_parts": n_parts, "n_bytes": n_bytes, "uploaded_at": db_now()}
    connection.execute(insert(archives).values(digest=digest, **row))


def keep(connection: Connection, digests: Collection[str]) -> list[str]:
    """Extend the life of archives as if they were uploaded now; return those that do not exist.

    Called in the transaction that writes a batch, so that no sweep removes them in between.
    """
    stored: set[str] = set()
    wanted = sorted(set(digests))
    for some in chunks(wanted):
        renewed = update(archives).where(archives.c.digest.in_(some)).values(uploaded_at=db_now())
        stored.update(connection.execute(renewed.returning(archives.c.digest)).scalars())
    return [digest for digest in wanted if digest not in stored]


def drop(connection: Connection, digest: str) -> None:
    """Drop the parts of an incomplete archive."""
    if connection.execute(select(archives.c.digest).filter_by(digest=digest)).first() is None:
        connection.execute(delete(parts).where(parts.c.digest == digest))


def sweep(connection: Connection, kept_s: float = KEPT_S) -> list[str]:
    """Drop archives that no batch uses and that were not uploaded for `kept_s`, and parts of incomplete ones.

    Returns the digests of the archives.
    """
    in_use = select(instances.c.archive).where(instances.c.archive == archives.c.digest).exists()
    old = delete(archives).where(age_of(archives.c.uploaded_at) > kept_s, ~in_use).returning(archives.c.digest)
    digests = list(connection.execute(old).scalars())
    complete = select(archives.c.digest).where(archives.c.digest == parts.c.digest).exists()
    connection.execute(delete(parts).where(age_of(parts.c.uploaded_at) > kept_s, ~complete))
    return digests
