"""Audits the batches of a farm all the time, at a low pace, and cries out once about each thing that must never be.

Whatever was never looked at comes first, so that no batch ends unseen while large ones are looked at in turn.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial

from farm.errors import NotFound
from farm.store import audit
from farm.store.audit import Violation
from farm.store.engine import Store

log = logging.getLogger(__name__)

_SHARE = 0.05
"""Of the time: so long it may go on after the first batch of a period, as far as there are others."""


class Auditor:
    """Looks at one batch each `period_s`, or a few small ones, in turn, while `leads` says that it is to.

    The dispatcher's process has one, in a thread of its own: a large batch would hold up its rounds for half a second.
    """

    def __init__(self, store: Store, period_s: float, leads: Callable[[], bool] = lambda: True) -> None:
        self._store = store
        self._period_s = period_s
        self._leads = leads
        self._looked_at: dict[str, float] = {}
        self._known: dict[str, set[Violation]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="auditor", daemon=True)

    def start(self) -> None:
        """Begin; a period of 0 s audits nothing."""
        if self._period_s > 0:
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._closed.wait(self._period_s):
            try:
                self._look_around()
            except Exception as error:
                log.warning("the audit could not look: %s", error)

    def _look_around(self) -> None:
        began = time.monotonic()
        while self._leads():
            self.look()
            if time.monotonic() - began > _SHARE * self._period_s:
                return
            if min(self._looked_at.values(), default=math.inf) >= began:
                return

    def look(self) -> list[Violation]:
        """Audit the batch, open or ended lately, that was not looked at for longest: what is wrong with it, once."""
        opened = self._store.read(audit.open_batches)
        self._looked_at = {batch_id: self._looked_at.get(batch_id, 0.0) for batch_id in opened}
        self._known = {batch_id: self._known.get(batch_id, set()) for batch_id in opened}
        if not opened:
            return []
        batch_id = min(opened, key=self._looked_at.__getitem__)
        self._looked_at[batch_id] = time.monotonic()
        try:
            found = self._store.read(partial(audit.violations, batch_id=batch_id))
        except NotFound:
            return []
        known = self._known.setdefault(batch_id, set())
        new = [violation for violation in found if violation not in known]
        known.update(new)
        for violation in new:
            log.error("ALARM %s", violation)
        return new
