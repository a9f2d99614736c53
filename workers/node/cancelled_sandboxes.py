"""Ends the sandboxes of cancelled rollouts on one node, all at once.

The worker that runs a rollout also ends its sandbox, but may be busy or hang. A rollout that waits for an agent, or was
just requeued, has no worker: its sandbox and memory would stay until the node's sweep, for seconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from farm.errors import StoreUnavailable
from farm.ids import eval_sandbox_id, rollout_of_sandbox, sandbox_id
from farm.notifications import CANCELLED, Signals
from farm.store import placement
from farm.store.database import Store
from workers.sandboxes.lifecycle.state import SandboxRecord, folder_of_all, terminate_all

log = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 0.5
"""Seconds between reads of the store without notifications."""
_PACE_S = 0.05
"""Seconds in which cancellations are collected, to be looked up together."""


class CancelledSandboxReaper:
    """Call `run` in a separate thread, until `stop`."""

    def __init__(self, store: Store, signals: Signals, node: str) -> None:
        self._store = store
        self._signals = signals
        self._node = node
        self._stopped = threading.Event()

    def run(self) -> None:
        """Look for such sandboxes; while the database is unavailable, try again."""
        listener = self._signals.listen(CANCELLED)
        try:
            while not self._stopped.wait(_PACE_S):
                listener.wait(_CHECK_INTERVAL_S)
                try:
                    _end(self._found())
                except StoreUnavailable:
                    continue
                except Exception:
                    log.exception("Sandboxes of cancelled rollouts not ended; retrying")
        finally:
            listener.close()

    def stop(self) -> None:
        self._stopped.set()

    def _found(self) -> list[str]:
        """Return the names of the sandboxes that no rollout needs and that only a sweep would end."""
        parent = folder_of_all()
        names = {each.name for each in parent.iterdir()} if parent.is_dir() else set()
        if not names:
            return []
        # read after the names were listed, so that the sandbox of a rollout placed meanwhile does not count as unneeded
        live = self._store.read(lambda connection: placement.live_sandboxes(connection, self._node), patience_s=0.0)
        unwanted = names.difference(name for each in live for name in _names(*each))
        result = {rollout_of_sandbox(name) for name in unwanted if not name.startswith(".")}
        if not result:
            return []
        away = self._store.read(lambda connection: placement.ended_or_requeued(connection, result), patience_s=0.0)
        return sorted(unwanted.intersection(name for each in away for name in _names(*each)))


def _names(rollout_id: str, attempt: int) -> tuple[str, str]:
    """Return the names of the policy's sandbox and of the one for its evaluation."""
    policys = sandbox_id(rollout_id, attempt)
    return policys, eval_sandbox_id(policys)


def _end(names: Sequence[str]) -> None:
    records = [record for record in map(SandboxRecord.load, map(folder_of_all().joinpath, names)) if record is not None]
    if records:
        terminate_all(records)
        log.info("Ended %d sandboxes of cancelled or requeued rollouts: %s", len(records), ", ".join(names[:5]))
