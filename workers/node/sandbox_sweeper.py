"""Removes sandboxes that no rollout of a node needs and no client borrows."""

from __future__ import annotations

import logging
import threading

from farm.errors import StoreUnavailable
from farm.ids import eval_sandbox_id, prepare_sandbox_id, sandbox_id
from farm.store import borrowed_sandboxes, placement
from farm.store.database import Store
from workers.sandboxes.lifecycle.reaper import sweep, sweep_dead_nodes

log = logging.getLogger(__name__)

_PERIOD_S = 5.0


class SandboxSweeper:
    """Call `run` in a separate thread, until `stop`: it waits for sandboxes in an uninterruptible sleep."""

    def __init__(self, store: Store, node: str) -> None:
        self._store = store
        self._node = node
        self._stopped = threading.Event()

    def run(self) -> None:
        """Sweep repeatedly; while the database is unavailable, nothing is removed."""
        while not self._stopped.wait(_PERIOD_S):
            try:
                self.sweep()
            except StoreUnavailable:
                continue
            except Exception:
                log.exception("Sandbox sweep failed; retrying")

    def stop(self) -> None:
        self._stopped.set()

    def sweep(self) -> None:
        """Remove the sandboxes of rollouts that are not on this node any more. Raises StoreUnavailable."""
        removed = sweep(self._needed)
        if dead := sweep_dead_nodes():
            log.warning("Removed leftovers of killed nodes: %s", ", ".join(dead))
        if removed:
            log.warning("Removed %d unused sandboxes: %s", len(removed), ", ".join(sorted(removed)[:5]))

    def _needed(self) -> set[str]:
        live = self._store.read(lambda connection: placement.live_sandboxes(connection, self._node))
        lent = self._store.read(lambda connection: borrowed_sandboxes.ids_of_node(connection, self._node))
        names = [sandbox_id(rollout_id, attempt) for rollout_id, attempt in live]
        return {*lent, *names, *map(eval_sandbox_id, names), *map(prepare_sandbox_id, names)}
