"""The claims of one worker process: renewed together, let go at once when cancelled or lost.

A worker that cannot renew for a whole lease stops its work by itself, because by then somebody else may have it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from farm.signals import CANCELLED, Signals
from farm.store import rollouts
from farm.store.engine import Store
from farm.store.rollouts import Claim

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Held:
    """A claim and how to stop the work on it. `reason` says why it was stopped: cancelled, lost or drained."""

    claim: Claim
    cancel: Callable[[], None] | None = None
    reason: str = ""

    def working(self, cancel: Callable[[], None]) -> None:
        """The work has begun and this stops it; at once, if it was to be stopped already."""
        self.cancel = cancel
        if self.reason:
            cancel()

    def stop(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason
            if self.cancel is not None:
                self.cancel()


def _is_named(rollout_ids: set[str], held: Held) -> bool:
    return held.claim.rollout_id in rollout_ids


class Leases:
    """Renews the claims that are `held` until closed, in a thread of its own."""

    def __init__(self, store: Store, signals: Signals, owner: str, lease_s: float) -> None:
        self.owner = owner
        self._store = store
        self._signals = signals
        self._lease_s = lease_s
        self._held: dict[str, Held] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.draining = False
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    @contextmanager
    def hold(self, claim: Claim) -> Iterator[Held]:
        """Keep a claim alive while the body runs."""
        held = Held(claim)
        with self._lock:
            self._held[claim.rollout_id] = held
            if self.draining:
                held.stop("drained")
        try:
            yield held
        finally:
            with self._lock:
                if self._held.get(claim.rollout_id) is held:
                    del self._held[claim.rollout_id]

    def drain(self) -> None:
        """Stop all work and take up no more: it is handed back to the queue."""
        self.draining = True
        self._stop(lambda held: True, "drained")

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        listener = self._signals.listen(CANCELLED)
        renewed = time.monotonic()
        due = renewed + self._lease_s / 3
        try:
            while not self._closed.is_set():
                for message in listener.wait(min(0.5, max(0.0, due - time.monotonic()))):
                    named = set(json.loads(message))
                    self._stop(partial(_is_named, named), "cancelled")
                if time.monotonic() >= due:
                    renewed = self._renew(renewed)
                    due = time.monotonic() + self._lease_s / 3
        except Exception:
            log.exception("leases can be renewed no more; all work stops")
            self._stop(lambda held: True, "lost")
        finally:
            listener.close()

    def _renew(self, renewed: float) -> float:
        """Renew all that is held; the moment of the last success."""
        with self._lock:
            held = dict(self._held)
        if not held:
            return time.monotonic()
        asked = time.monotonic()
        try:
            kept = self._store.write(lambda connection: rollouts.renew(connection, self.owner, held, self._lease_s))
        except Exception as error:
            log.warning("leases could not be renewed: %s", error)
            if time.monotonic() - renewed > self._lease_s:
                self._stop(lambda each: True, "lost")
            return renewed
        for rollout_id in held.keys() - kept:
            held[rollout_id].stop("lost")
        return asked

    def _stop(self, chosen: Callable[[Held], bool], reason: str) -> None:
        with self._lock:
            held = [each for each in self._held.values() if chosen(each)]
        for each in held:
            log.info("%s: stopping stage %s (%s)", each.claim.rollout_id, each.claim.stage, reason)
            each.stop(reason)
