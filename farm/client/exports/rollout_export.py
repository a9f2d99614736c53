"""Ended rollouts that match a filter, with their messages and training rows, read a page at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, select

from farm.client.exports.rollout_line import rollout_values
from farm.client.local import LocalFarm
from farm.store import batches, trajectories
from farm.store.blobs import stored_annotations
from farm.store.reports import rollout_table
from farm.store.reports.rollout_table import RolloutFilter
from farm.store.retention.kept import check_kept
from farm.store.rollouts import batches as batch_rows

PAGE = 32
"""Rollouts held in memory at a time."""


def exported(farm: LocalFarm, batch_id: str, wanted: RolloutFilter) -> Iterator[dict[str, Any]]:
    """Yield the values of each rollout in the form of `rollout_values`. Raises NotFound, Pruned before the first."""
    farm.status(batch_id)
    farm.store.read(lambda connection: check_kept(connection, batch_id))
    after = ""
    while True:
        page = farm.store.read(lambda connection: rollout_table.page(connection, batch_id, wanted, after, PAGE))  # noqa: B023
        ids = [rollout.rollout_id for rollout in page.rollouts]
        rows = farm.store.read(lambda connection: trajectories.segments_of(connection, batch_id, ids))  # noqa: B023
        for rollout in batches.with_segments(page.rollouts, rows):
            key = rollout.rollout_id
            figures = farm.store.read(lambda connection: stored_annotations.listing(connection, [key]))  # noqa: B023
            yield rollout_values(rollout, farm.calls(key), farm.timings(key), farm.rewards(key), figures)
        after = page.after
        if not after:
            return


def all_batches(connection: Connection) -> list[str]:
    """Return the batches whose trajectories still exist, oldest first."""
    kept = batch_rows.c.pruned.not_in(["rewards", "nothing"])
    return list(
        connection.execute(select(batch_rows.c.batch_id).where(kept).order_by(batch_rows.c.created_at)).scalars().all()
    )
