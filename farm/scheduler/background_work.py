"""Background work of the leading dispatcher, each kind in a thread of its own: audits of batches, and pruning by age.

An audit raises one alarm per violation, at a low rate, and alarms about engines that get no calls because they lack the
farm's weights or were left paused. Batches that were never checked come first, so that none ends unchecked while large
ones are checked.

After a clock jump nothing is pruned for a day: with a wrong clock, new data would look old.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial

from farm.errors import NotFound
from farm.observing.periodic_thread import PeriodicThread
from farm.records.rollout import Violation
from farm.settings import Settings
from farm.store import llm_engines
from farm.store.access import audit_log
from farm.store.database import Store
from farm.store.reports import audit
from farm.store.retention.pruning import PrunedBatch, Pruner, ages
from farm.store.sql.clock import Timekeeper, store_time

log = logging.getLogger(__name__)

_SHARE = 0.05
"""The part of a period in which it may check further batches after the first."""

_DAY_S = 86_400.0
_FIRST_S = 300.0
_PERIOD_S = 3600.0
_POLL_S = 60.0
"""Seconds between readings of the clock."""


class InvariantChecker(PeriodicThread):
    """Checks one batch each `period_s`, or a few small ones, in turn, while `leads` returns True.

    It runs in the dispatcher's process, in a thread of its own: a large batch would block a round for half a second.
    """

    def __init__(self, store: Store, period_s: float, leads: Callable[[], bool] = lambda: True) -> None:
        super().__init__("auditor", period_s, leads, self.look_around, log, "the audit could not look")
        self._store = store
        self._looked_at: dict[str, float] = {}
        self._known: dict[str, set[Violation]] = {}
        self._troubled: set[tuple[str, str]] = set()

    def start(self) -> None:
        """Start the thread; a period of 0 s turns audits off."""
        if self._period_s > 0:
            super().start()

    def look_around(self) -> None:
        """Check the engines, then one batch, and further ones while the period's share lasts."""
        began = time.monotonic()
        if self._leads():
            self.look_at_engines()
        while self._leads():
            self.look()
            if time.monotonic() - began > _SHARE * self._period_s:
                return
            if min(self._looked_at.values(), default=math.inf) >= began:
                return

    def look_at_engines(self) -> list[str]:
        """Log engines that get no calls without intervention, once per incident. Returns the messages."""
        troubled = [
            engine
            for engine in self._store.read(llm_engines.listing)
            if engine.abandoned or engine.status == "without weights"
        ]
        new = [engine for engine in troubled if (engine.url, engine.status) not in self._troubled]
        self._troubled = {(engine.url, engine.status) for engine in troubled}
        messages = [f"engine {engine.url} {engine.trouble}" for engine in new]
        for words in messages:
            log.error("ALARM %s", words)
        return messages

    def look(self) -> list[Violation]:
        """Audit the least recently checked batch, open or ended lately; return its violations, each once."""
        opened = self._store.read(audit.open_batches)
        self._looked_at = {batch_id: self._looked_at.get(batch_id, 0.0) for batch_id in opened}
        self._known = {batch_id: self._known.get(batch_id, set()) for batch_id in opened}
        if not opened:
            return []
        batch_id = min(opened, key=self._looked_at.__getitem__)
        self._looked_at[batch_id] = time.monotonic()
        try:
            violations = self._violations(batch_id)
        except NotFound:
            return []
        known = self._known.setdefault(batch_id, set())
        new = [violation for violation in violations if violation not in known]
        known.update(new)
        for violation in new:
            log.error("ALARM %s", violation)
        return new

    def _violations(self, batch_id: str) -> list[Violation]:
        """Return `audit.violations`, part by part: other work of this process uses the connection in between."""
        numbers, violations = self._store.read(partial(audit.of_batch, batch_id=batch_id))
        for groups in audit.parts(numbers):
            if self.closed:
                break
            violations += self._store.read(partial(audit.of_rollouts, batch_id=batch_id, groups=groups))
        return violations[: audit.LIMIT]


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
