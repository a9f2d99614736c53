"""Ends the sandboxes of rollouts that were taken away between two stages, on one node.

Who plays a rollout ends its sandbox when it is cancelled. One that waits for an agent is played by nobody, so its
sandbox would be there until the node's sweep, for seconds, and its memory with it.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

from farm.errors import StoreUnavailable
from farm.signals import CANCELLED, Signals
from farm.store import placement
from farm.store.engine import Store
from workers.sandboxes.ending import end
from workers.sandboxes.record import Record, folder_of_all
from workers.stages import sandbox_id

log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""How often the store is asked, whatever hints come."""
_PACE_S = 0.05
"""What is cancelled within this time is looked for together."""
_N_THREADS = 8


class Orphans:
    """`run` until `stop`, in a thread of its own."""

    def __init__(self, store: Store, signals: Signals, node: str) -> None:
        self._store = store
        self._signals = signals
        self._node = node
        self._stopped = threading.Event()

    def run(self) -> None:
        """Look for them; a database that is away is asked again."""
        listener = self._signals.listen(CANCELLED)
        try:
            with ThreadPoolExecutor(_N_THREADS, "orphans") as threads:
                while not self._stopped.wait(_PACE_S):
                    listener.wait(_LOOK_S)
                    try:
                        list(threads.map(_end, self._found()))
                    except StoreUnavailable:
                        continue
                    except Exception:
                        log.exception("the sandboxes of cancelled rollouts were not ended; the next look may find them")
        finally:
            listener.close()

    def stop(self) -> None:
        self._stopped.set()

    def _found(self) -> list[str]:
        """The names of the sandboxes that nobody wants, or will ever end but who sweeps."""
        parent = folder_of_all()
        names = {each.name for each in parent.iterdir()} if parent.is_dir() else set()
        if not names:
            return []
        # only now: the sandbox of what is placed after the names were listed is not taken for unwanted
        live = self._store.read(lambda connection: placement.live_sandboxes(connection, self._node), patience_s=0.0)
        unwanted = names.difference(sandbox_id(*each) for each in live)
        asked = {name.rpartition(".")[0] for name in unwanted if not name.startswith(".")}
        if not asked:
            return []
        waited = self._store.read(lambda connection: placement.left_waiting(connection, asked), patience_s=0.0)
        return sorted(unwanted.intersection(sandbox_id(*each) for each in waited))


def _end(name: str) -> None:
    record = Record.load(folder_of_all() / name)
    if record is not None:
        end(record)
        log.info("ended sandbox %s, whose rollout was taken away while it waited for an agent", name)
