"""A thread of the leading dispatcher that prunes batches by the age limits of the settings.

After a clock jump it waits for a day: with a wrong clock, new data would look old.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from farm.observing.periodic_thread import PeriodicThread
from farm.settings import Settings
from farm.store.access import audit_log
from farm.store.database import Store
from farm.store.retention.pruning import PrunedBatch, Pruner, ages
from farm.store.sql.clock import Timekeeper, store_time

log = logging.getLogger(__name__)

_DAY_S = 86_400.0
_FIRST_S = 300.0
_PERIOD_S = 3600.0
_POLL_S = 60.0
"""Seconds between readings of the clock."""


class RetentionKeeper(PeriodicThread):
    """Prunes once an hour while `leads` returns True."""

    def __init__(self, store: Store, settings: Settings, leads: Callable[[], bool]) -> None:
        super().__init__("retention", _POLL_S, leads, self.look, log, "nothing could be pruned now")
        self._store = store
        self._settings = settings
        self._timekeeper = Timekeeper()
        self._next = time.monotonic() + _FIRST_S

    def look(self) -> None:
        """Read the clock, and prune if it is time to."""
        _, jump_s = self._timekeeper.read(lambda: self._store.read(store_time))
        if jump_s:
            log.warning("Database clock jumped by %.0f s; nothing is pruned for a day", jump_s)
            self._next = time.monotonic() + _DAY_S
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PERIOD_S
            self.prune()

    def prune(self) -> list[PrunedBatch]:
        """Prune by the settings. Returns the batches."""
        known = self._settings
        pruner = Pruner(self._store, lambda: self._leads() and not self.closed)
        done = []
        for age_s, kept in ages(known):
            done += pruner.prune(age_s, kept)
        if known.keep_trajectories_days:
            pruner.forget(known.keep_trajectories_days * _DAY_S)
        if known.keep_log_days:
            self._store.write(lambda connection: audit_log.prune(connection, known.keep_log_days))
        if done:
            newest = time.strftime("%F", time.gmtime(max(each.ended_at for each in done)))
            log.warning("Pruned %d batches by the settings keep_…_days; the newest ended %s", len(done), newest)
        return done
