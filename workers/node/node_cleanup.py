"""Removes what a node no longer needs: sandboxes of cancelled rollouts soon, all others by a sweep, and old images.

The worker that runs a rollout also ends its sandbox, but may be busy or hang. A rollout that waits for an agent, or was
just requeued, has no worker: its sandbox and memory would stay until the node's sweep, for seconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from farm.errors import StoreUnavailable
from farm.ids import eval_sandbox_id, prepare_sandbox_id, rollout_of_sandbox, sandbox_id
from farm.notifications import CANCELLED, Signals
from farm.settings import Settings
from farm.store import borrowed_sandboxes, placement
from farm.store.database import Store
from workers.config import SandboxConfig
from workers.sandboxes.images.image_pruning import prune_by_itself
from workers.sandboxes.lifecycle.reaper import sweep, sweep_dead_nodes
from workers.sandboxes.lifecycle.state import SandboxRecord, terminate_all

log = logging.getLogger(__name__)

_POLL_S = 0.5
"""Seconds between reads of the store without notifications of cancellations."""
_COLLECT_S = 0.05
"""Seconds in which cancellations are collected, to be looked up together."""
_SWEEP_PERIOD_S = 5.0
_FIRST_PRUNING_S = 600.0
_PRUNING_PERIOD_S = 3600.0
_DAY_S = 86_400.0
_MB = 1_000_000


class CancelledSandboxReaper:
    """Call `run` in a separate thread; it returns once `stopped` is set."""

    def __init__(self, store: Store, signals: Signals, node: str, sandboxes: Path, stopped: threading.Event) -> None:
        """`sandboxes` is the folder of all sandboxes."""
        self._store = store
        self._signals = signals
        self._node = node
        self._sandboxes = sandboxes
        self._stopped = stopped

    def run(self) -> None:
        """Look for such sandboxes; while the database is unavailable, try again."""
        listener = self._signals.listen(CANCELLED)
        try:
            while not self._stopped.wait(_COLLECT_S):
                listener.wait(_POLL_S)
                try:
                    _end(self._sandboxes, self._unneeded())
                except StoreUnavailable:
                    continue
                except Exception:
                    log.exception("Sandboxes of cancelled rollouts not ended; retrying")
        finally:
            listener.close()

    def _unneeded(self) -> list[str]:
        """Return the names of the sandboxes that no rollout needs and that only a sweep would end."""
        parent = self._sandboxes
        names = {each.name for each in parent.iterdir()} if parent.is_dir() else set()
        if not names:
            return []
        # read after the names were listed, so that the sandbox of a rollout placed meanwhile does not count as unneeded
        live = self._store.read(lambda connection: placement.live_sandboxes(connection, self._node), patience_s=0.0)
        unwanted = names.difference(name for each in live for name in _names(*each))
        rollout_ids = {rollout_of_sandbox(name) for name in unwanted if not name.startswith(".")}
        if not rollout_ids:
            return []
        ended = self._store.read(
            lambda connection: placement.ended_or_requeued(connection, rollout_ids), patience_s=0.0
        )
        return sorted(unwanted.intersection(name for each in ended for name in _names(*each)))


def _names(rollout_id: str, attempt: int) -> tuple[str, str]:
    """Return the names of the policy's sandbox and of the one for its evaluation."""
    policys = sandbox_id(rollout_id, attempt)
    return policys, eval_sandbox_id(policys)


def _end(sandboxes: Path, names: Sequence[str]) -> None:
    records = [record for record in map(SandboxRecord.load, map(sandboxes.joinpath, names)) if record is not None]
    if records:
        terminate_all(records)
        log.info("Ended %d sandboxes of cancelled or requeued rollouts: %s", len(records), ", ".join(names[:5]))


class SandboxSweeper:
    """Removes the sandboxes that no rollout needs and no client borrows.

    Call `run` in a separate thread, until `stopped` is set: it waits for sandboxes in an uninterruptible sleep.
    """

    def __init__(self, store: Store, node: str, config: SandboxConfig, stopped: threading.Event) -> None:
        self._store = store
        self._node = node
        self._config = config
        self._stopped = stopped

    def run(self) -> None:
        """Sweep repeatedly; while the database is unavailable, nothing is removed."""
        while not self._stopped.wait(_SWEEP_PERIOD_S):
            try:
                self.sweep()
            except StoreUnavailable:
                continue
            except Exception:
                log.exception("Sandbox sweep failed; retrying")

    def sweep(self) -> None:
        """Remove the sandboxes of rollouts that are not on this node any more. Raises StoreUnavailable."""
        removed = sweep(self._config, self._needed)
        if dead := sweep_dead_nodes(self._config):
            log.warning("Removed leftovers of killed nodes: %s", ", ".join(dead))
        if removed:
            log.warning("Removed %d unused sandboxes: %s", len(removed), ", ".join(sorted(removed)[:5]))

    def _needed(self) -> set[str]:
        live = self._store.read(lambda connection: placement.live_sandboxes(connection, self._node))
        lent = self._store.read(lambda connection: borrowed_sandboxes.ids_of_node(connection, self._node))
        names = [sandbox_id(rollout_id, attempt) for rollout_id, attempt in live]
        return {*lent, *names, *map(eval_sandbox_id, names), *map(prepare_sandbox_id, names)}


class CacheKeeper:
    """Keeps the cache of images, environments and programs within its bounds: once an hour, while the block runs."""

    def __init__(self, options: Settings, first_s: float = _FIRST_PRUNING_S) -> None:
        self._options = options
        self._first_s = first_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caches", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        # no wait for the removal of a large image on a slow disk: the next pruning continues with the moved folder
        self._closed.set()

    def _run(self) -> None:
        wait_s = self._first_s
        while not self._closed.wait(wait_s):
            wait_s = _PRUNING_PERIOD_S
            try:
                self.prune()
            except Exception as error:
                log.warning("Cache not pruned: %s", error)

    def prune(self) -> None:
        config = SandboxConfig.of(self._options)
        gone = [
            each.entry
            for each in prune_by_itself(config, self._options.keep_cache_days * _DAY_S, self._options.cache_mb * _MB)
            if not each.kept
        ]
        if gone:
            n_mb = sum(entry.card.n_bytes for entry in gone) // _MB
            log.warning("Removed %d images and other folders of the cache, %d MB", len(gone), n_mb)
