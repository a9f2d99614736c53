"""Ends the sandboxes of rollouts that were cancelled, on one node, all at once and not one by one.

Who plays a rollout ends its sandbox too, but may be busy, or hang. And one that waits for an agent, or is handed back
then, is played by nobody: its sandbox would be there until the node's sweep, for seconds, and its memory with it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from farm.errors import StoreUnavailable
from farm.signals import CANCELLED, Signals
from farm.store import placement
from farm.store.engine import Store
from workers.sandboxes.ending import end_all
from workers.sandboxes.record import Record, folder_of_all
from workers.stages import fresh_id, sandbox_id

log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""How often the store is asked, whatever hints come."""
_PACE_S = 0.05
"""What is cancelled within this time is looked for together."""


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
            while not self._stopped.wait(_PACE_S):
                listener.wait(_LOOK_S)
                try:
                    _end(self._found())
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
        unwanted = names.difference(name for each in live for name in _names(*each))
        asked = {_rollout_of(name) for name in unwanted if not name.startswith(".")}
        if not asked:
            return []
        away = self._store.read(lambda connection: placement.taken_away(connection, asked), patience_s=0.0)
        return sorted(unwanted.intersection(name for each in away for name in _names(*each)))


def _names(rollout_id: str, attempt: int) -> tuple[str, str]:
    """The policy's sandbox, and the one that it is scored in."""
    policys = sandbox_id(rollout_id, attempt)
    return policys, fresh_id(policys)


def _rollout_of(name: str) -> str:
    """The rollout whose sandbox has that name, of whichever attempt: `batch.group.sample.…`."""
    return ".".join(name.split(".")[:3])


def _end(names: Sequence[str]) -> None:
    records = [record for record in map(Record.load, map(folder_of_all().joinpath, names)) if record is not None]
    if records:
        end_all(records)
        log.info("ended %d sandboxes whose rollouts were taken away: %s", len(records), ", ".join(names[:5]))
