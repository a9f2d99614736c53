"""Submissions: the scored parts of rollouts."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from farm.store.rollouts import rollouts


def submission(connection: Connection, rollout_id: str) -> dict[str, Any] | None:
    """Return the scored part of a rollout; None if it did not get that far."""
    statement = select(rollouts.c.submission).where(rollouts.c.rollout_id == rollout_id)
    result: dict[str, Any] | None = connection.execute(statement).scalar_one_or_none()
    return result
