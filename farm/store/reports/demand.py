"""The capacity that a farm needs at the moment, for autoscalers of its nodes."""

from __future__ import annotations

from sqlalchemy import Connection

from farm.records.request import Limits
from farm.store import batches, borrowed_sandboxes, placement

_MOST = 100_000
"""The limit for counting the waiting rollouts of a batch."""


def slots_wanted(connection: Connection) -> int:
    """Return how many rollouts and borrowed sandboxes have a node's slot, or could be given one."""
    n_rollouts = sum(wait.n_waiting for wait in placement.waiting(connection, _MOST))
    n_sandboxes = sum(wait.n_waiting for wait in borrowed_sandboxes.waiting(connection, _MOST))
    return sum(placement.occupied(connection).values()) + n_rollouts + n_sandboxes


def longest_s(connection: Connection) -> float:
    """Return the longest time that a waiting rollout may take, by its batch's limits; 0 if none waits."""
    waiting = placement.waiting(connection, 1)
    every = [Limits.model_validate(batches.request_of(connection, each.batch_id).get("limits", {})) for each in waiting]
    return max((limits.init_s + limits.run_s + limits.eval_s for limits in every), default=0.0)
