"""Artefacts of tool calls that the model did not see, such as the full text of a long output, or an image.

Each is stored as one zstandard frame. They are deleted with the rollout, and belong to one attempt, like model calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zstandard
from sqlalchemy import Connection, func, insert, select

from farm.errors import NotFound
from farm.ids import RolloutRef
from farm.records.rollout import KeptArtefact, State
from farm.store.retention.kept import check_artefacts_kept
from farm.store.rollouts import Claim, rollouts
from farm.store.sql.clock import db_now
from farm.store.sql.schema import ArtefactRow

artefacts = ArtefactRow.__table__


def packed(data: bytes) -> bytes:
    """Compress an artefact, or a part of a task archive, to its stored form."""
    return zstandard.ZstdCompressor(level=3).compress(data)


def keep(connection: Connection, held: Claim, name: str, media_type: str, n_bytes: int, data: bytes) -> bool:
    """Store an artefact, `packed`, for the holder of a claim. False if the claim is gone: then nothing is stored."""
    key = {"rollout_id": held.rollout_id, "attempt": held.attempt, "name": name}
    if connection.execute(select(artefacts.c.name).filter_by(**key)).first() is not None:
        return True
    claimed = {"rollout_id": held.rollout_id, "attempt": held.attempt, "stage": held.stage.value, "owner": held.owner}
    is_held = select(rollouts.c.rollout_id).filter_by(**claimed, state=State.ACTIVE.value)
    if connection.execute(is_held).first() is None:
        return False
    row: dict[str, Any] = {"media_type": media_type, "n_bytes": n_bytes, "data": data, "created_at": db_now()}
    connection.execute(insert(artefacts).values(**key, **row))
    return True


def listing(connection: Connection, rollout_id: str) -> Sequence[KeptArtefact]:
    """Return the artefacts of a rollout's last attempt that has any, in order of creation."""
    columns = (artefacts.c.name, artefacts.c.media_type, artefacts.c.n_bytes, func.length(artefacts.c.data))
    statement = (
        select(*columns, artefacts.c.attempt, artefacts.c.created_at)
        .where(artefacts.c.rollout_id == rollout_id, artefacts.c.attempt == _last_attempt(rollout_id))
        .order_by(artefacts.c.created_at, artefacts.c.name)
    )
    kept = [KeptArtefact(*row) for row in connection.execute(statement)]
    if not kept:
        check_artefacts_kept(connection, RolloutRef.of(rollout_id).batch_id)
    return kept


def contents(connection: Connection, rollout_id: str, name: str) -> bytes:
    """Return the bytes of an artefact of the attempt that `listing` shows. Raises NotFound."""
    statement = select(artefacts.c.data, artefacts.c.n_bytes).where(
        artefacts.c.rollout_id == rollout_id,
        artefacts.c.attempt == _last_attempt(rollout_id),
        artefacts.c.name == name,
    )
    row = connection.execute(statement).one_or_none()
    if row is None:
        check_artefacts_kept(connection, RolloutRef.of(rollout_id).batch_id)
        raise NotFound(f"rollout {rollout_id} has no artefact {name!r}: `farm artefacts {rollout_id}` lists them")
    return zstandard.ZstdDecompressor().decompress(row.data, max_output_size=row.n_bytes)


def packed_contents(connection: Connection, rollout_id: str, attempt: int, name: str) -> bytes:
    """Return an artefact of one attempt in its stored form. Raises NotFound."""
    key = {"rollout_id": rollout_id, "attempt": attempt, "name": name}
    data = connection.execute(select(artefacts.c.data).filter_by(**key)).scalar()
    if data is None:
        raise NotFound(f"attempt {attempt} of rollout {rollout_id} has no artefact {name!r}")
    return bytes(data)


def _last_attempt(rollout_id: str) -> Any:
    return select(func.max(artefacts.c.attempt)).where(artefacts.c.rollout_id == rollout_id).scalar_subquery()
