"""The levels of retention of a batch, and the check that requested data was not pruned."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Any

from sqlalchemy import Connection, Select, bindparam, select

from farm.errors import Pruned
from farm.store.rollouts import batches


class RetentionLevel(StrEnum):
    """The most that is left of a pruned batch; each level keeps less than the one before."""

    TRAJECTORIES = "trajectories"
    """All training data: model calls and rows of the attempt that counts, scores; no artefacts or earlier attempts."""
    REWARDS = "rewards"
    """Scores, counts and failures of each rollout."""
    NOTHING = "nothing"
    """Nothing, once pruning is complete."""

    @property
    def less(self) -> list[str]:
        """The levels that keep less than this one."""
        return [each.value for each in list(RetentionLevel)[list(RetentionLevel).index(self) + 1 :]]


def check_kept(connection: Connection, batch_id: str, level: RetentionLevel = RetentionLevel.TRAJECTORIES) -> None:
    """Raise Pruned if less than this level is left of a batch."""
    row = connection.execute(_pruned(level), {"b_id": batch_id}).one_or_none()
    if row is not None:
        at = "" if row.pruned_at is None else f" on {datetime.fromtimestamp(row.pruned_at, UTC):%Y-%m-%d}"
        left = (
            "its rewards, counts and failures are kept"
            if row.pruned == RetentionLevel.REWARDS
            else "nothing of it is kept"
        )
        raise Pruned(f"batch {batch_id} was pruned{at}: {left}, its trajectories are gone")


@cache
def _pruned(level: RetentionLevel) -> Select[Any]:
    pruned = (batches.c.batch_id == bindparam("b_id"), batches.c.pruned.in_(level.less))
    return select(batches.c.pruned, batches.c.pruned_at).where(*pruned)


def check_artefacts_kept(connection: Connection, batch_id: str) -> None:
    """Raise Pruned if the artefacts of a batch are gone."""
    check_kept(connection, batch_id)
    pruned = select(batches.c.pruned).where(batches.c.batch_id == batch_id)
    if connection.execute(pruned).scalar_one_or_none():
        raise Pruned(f"batch {batch_id} was pruned: its trajectories are kept, its artefacts are gone")
