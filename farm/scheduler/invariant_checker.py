"""A background audit of a farm's batches, at a low pace, which raises one alarm about each violation.

So it does about engines that get no calls, as they lack the farm's weights or were left paused.

Batches that were never checked come first, so that none ends unchecked while large ones are checked in turn.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial

from farm.errors import NotFound
from farm.observing.periodic_thread import PeriodicThread
from farm.records.conservation import Violation
from farm.store import llm_engines
from farm.store.database import Store
from farm.store.reports import audit

log = logging.getLogger(__name__)

_SHARE = 0.05
"""The part of a period for which it may go on after the first batch, as far as there are others."""


class InvariantChecker:
    """Checks one batch each `period_s`, or a few small ones, in turn, while `leads` returns True.

    The dispatcher's process has one, in a separate thread: a large batch would block its rounds for half a second.
    """

    def __init__(self, store: Store, period_s: float, leads: Callable[[], bool] = lambda: True) -> None:
        self._store = store
        self._period_s = period_s
        self._leads = leads
        self._looked_at: dict[str, float] = {}
        self._known: dict[str, set[Violation]] = {}
        self._troubled: set[tuple[str, str]] = set()
        self._thread = PeriodicThread("auditor", period_s, self.look_around, log, "the audit could not look")

    def start(self) -> None:
        """Begin; a period of 0 s audits nothing."""
        if self._period_s > 0:
            self._thread.start()

    def close(self) -> None:
        self._thread.close()

    def look_around(self) -> None:
        """Check the engines, then one batch, and others for as long as a period has room for them."""
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
        """Log engines that get no calls without intervention, each once until it is over. Returns the messages."""
        result = [
            engine
            for engine in self._store.read(llm_engines.listing)
            if engine.abandoned or engine.status == "without weights"
        ]
        new = [engine for engine in result if (engine.url, engine.status) not in self._troubled]
        self._troubled = {(engine.url, engine.status) for engine in result}
        said = [f"engine {engine.url} {engine.trouble}" for engine in new]
        for words in said:
            log.error("ALARM %s", words)
        return said

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
            result = self._violations(batch_id)
        except NotFound:
            return []
        known = self._known.setdefault(batch_id, set())
        new = [violation for violation in result if violation not in known]
        known.update(new)
        for violation in new:
            log.error("ALARM %s", violation)
        return new

    def _violations(self, batch_id: str) -> list[Violation]:
        """As `audit.violations`, but each part by itself: others of this process have the connection in between."""
        numbers, result = self._store.read(partial(audit.of_batch, batch_id=batch_id))
        for groups in audit.parts(numbers):
            if self._thread.closed:
                break
            result += self._store.read(partial(audit.of_rollouts, batch_id=batch_id, groups=groups))
        return result[: audit.LIMIT]
