"""The claims of one worker process: renewed together, let go when they are cancelled, lost or beyond their deadline.

While the store does not answer nobody else can claim either, so work goes on; what the store says when it is back
counts. Deadlines are held here once more, from outside of the work: a stage that has not ended by itself long after its
limit is stopped, and if it does not heed that either, nobody waits for it any longer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from farm.errors import StoreUnavailable
from farm.rollout import State
from farm.signals import CANCELLED, Listener, Signals
from farm.store import leases
from farm.store.engine import Store
from farm.store.rollouts import Claim
from workers.loop import Running

log = logging.getLogger(__name__)

_TURN_S = 0.5
_LATE_S = 30.0
"""No broker that does not answer holds a turn up for so long."""
_GONE = ("cancelled", "lost")
_LOOK_S = 0.5
"""How often the store is asked what was taken away, whatever hints come: who cancels may not reach the broker."""
_SOON_S = 0.1
"""While a renewal is not answered, it is seen to so often."""


@dataclass(slots=True)
class Held:
    """A claim and how to stop the work on it. `reason` says why it was stopped.

    That is one of cancelled, lost, drained; overdue, when it took longer than `limit_s`, not counting `excused_s`;
    stalled, when the process is about to end because it hangs.
    """

    claim: Claim
    reason: str = ""
    limit_s: float = math.inf
    excused_s: Callable[[], float] = field(default=lambda: 0.0)
    _work: Running[Any] | None = None
    _began_at: float = 0.0
    _stopped_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def working(self, work: Running[Any]) -> None:
        """The work has begun; it is stopped at once, if it was to be stopped already."""
        with self._lock:
            self._work, self._began_at = work, time.monotonic()
            if self.reason:
                self._end()

    def stop(self, reason: str) -> None:
        """Stop the work, unless it was stopped, or has ended: then its result is still to be written."""
        with self._lock:
            if self.reason or (self._work is not None and self._work.future.done()):
                return
            log.info("%s: stopping stage %s (%s)", self.claim.rollout_id, self.claim.stage, reason)
            self.reason = reason
            if self._work is not None:
                self._end()

    def abandon(self) -> None:
        """Do not wait until the work has ended, which was stopped, if it has not."""
        with self._lock:
            if self._work is not None:
                self._work.abandon(asyncio.CancelledError())

    def _end(self) -> None:
        assert self._work is not None
        self._stopped_at = time.monotonic()
        if self.reason == "stalled":
            self._work.abandon(asyncio.CancelledError())
        else:
            self._work.cancel()

    @property
    def is_overdue(self) -> bool:
        return (
            self._work is not None
            and not self._work.future.done()
            and time.monotonic() - self._began_at > self.limit_s + self.excused_s()
        )

    def forgive(self, time_s: float) -> None:
        """Count it as if it had begun, and been stopped, so much later."""
        with self._lock:
            self._began_at += time_s
            self._stopped_at += time_s if self._stopped_at else 0.0

    def is_deaf(self, patience_s: float) -> bool:
        """Whether the work has not ended although it was stopped so long ago."""
        return (
            self._work is not None
            and not self._work.future.done()
            and bool(self._stopped_at)
            and time.monotonic() - self._stopped_at > patience_s
        )

    @property
    def hangs(self) -> bool:
        """Whether nobody waits for the work any longer, but it is still there."""
        return self._work is not None and self._work.future.done() and not self._work.ended


class Leases:
    """Renews the claims that are `held` until closed, in a thread of its own.

    What does not heed that it was stopped is waited for `stall_s`.
    """

    def __init__(self, store: Store, signals: Signals, owner: str, lease_s: float, stall_s: float) -> None:
        self.owner = owner
        self.draining = False
        self._store = store
        self._signals = signals
        self._lease_s = lease_s
        self._stall_s = stall_s
        self._held: dict[tuple[str, int], Held] = {}
        self._abandoned: list[Held] = []
        self._lock = threading.Lock()
        self._renewing: tuple[Future[set[str]], Mapping[tuple[str, int], Held]] | None = None
        self._renew_at = time.monotonic() + lease_s / 3
        self._look_at = 0.0
        self._turned_at = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    @contextmanager
    def hold(self, claim: Claim) -> Iterator[Held]:
        """Keep a claim alive while the body runs."""
        held, key = Held(claim), (claim.rollout_id, claim.attempt)
        with self._lock:
            earlier = [each for (rollout_id, _), each in self._held.items() if rollout_id == claim.rollout_id]
            self._held[key] = held
            if self.draining:
                held.stop("drained")
        for each in earlier:
            # it was taken away, and has come back here as another attempt
            each.stop("lost")
        try:
            yield held
        finally:
            with self._lock:
                del self._held[key]

    def held(self, claim: Claim) -> Held:
        """That of a claim that is held. KeyError for another."""
        return self._held[claim.rollout_id, claim.attempt]

    def all_held(self) -> Mapping[tuple[str, int], Held]:
        """What is held at this moment, by rollout and attempt."""
        with self._lock:
            return dict(self._held)

    @property
    def n_hanging(self) -> int:
        """Stages that nobody waits for any longer and that have not ended."""
        with self._lock:
            self._abandoned = [each for each in self._abandoned if each.hangs]
            return len(self._abandoned)

    def drain(self) -> None:
        """Stop all work and take up no more: it is handed back to the queue."""
        self.draining = True
        for held in self.all_held().values():
            held.stop("drained")

    def abandon(self) -> None:
        """Hand all work back at once, whether it ends or not: the process is about to."""
        self.draining = True
        for held in self.all_held().values():
            held.stop("stalled")
            held.abandon()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        listener = self._signals.listen(CANCELLED)
        try:
            while not self._closed.is_set():
                try:
                    self._turn(listener)
                except Exception:
                    # whatever came in, without this thread every claim of the process would be lost
                    log.exception("the claims could not be looked after; they will be")
                    self._closed.wait(_TURN_S)
        finally:
            listener.close()

    def _turn(self, listener: Listener) -> None:
        for message in listener.wait(self._pause_s()):
            named = _named(message)
            for held in self.all_held().values():
                if held.claim.rollout_id in named:
                    held.stop("cancelled")
        self._renew()
        self._forgive()
        self._stop_overdue()
        self._look()

    def _pause_s(self) -> float:
        if self._renewing is not None:
            return _SOON_S
        return max(0.0, min(_TURN_S, self._lease_s / 12, self._look_at - time.monotonic()))

    def _forgive(self) -> None:
        """Time in which this thread did not run either, as that of a process that was frozen, is not the work's."""
        late_s = time.monotonic() - self._turned_at - _TURN_S
        self._turned_at = time.monotonic()
        if late_s > _LATE_S:
            for held in self.all_held().values():
                held.forgive(late_s)

    def _stop_overdue(self) -> None:
        for held in self.all_held().values():
            if held.is_overdue:
                held.stop("overdue")
            if held.is_deaf(self._stall_s):
                where = f"{held.claim.rollout_id}: stage {held.claim.stage}"
                log.error("%s was stopped (%s) and has not ended after %g s", where, held.reason, self._stall_s)
                held.abandon()
                with self._lock:
                    self._abandoned.append(held)

    def _renew(self) -> None:
        """Take note of what was renewed, or have it renewed; a store that is away lets the answer wait."""
        if self._renewing is not None:
            future, asked = self._renewing
            if not future.done():
                return
            self._renewing = None
            kept = future.result()
            for (rollout_id, _), held in asked.items():
                if rollout_id not in kept:
                    held.stop("lost")
        if time.monotonic() >= self._renew_at:
            self._renew_at = time.monotonic() + self._lease_s / 3
            asked = {key: held for key, held in self.all_held().items() if held.reason not in _GONE}
            if asked:
                ids = {rollout_id for rollout_id, _ in asked}
                owner, lease_s = self.owner, self._lease_s
                renew = self._store.submit(lambda connection: leases.renew(connection, owner, ids, lease_s))
                self._renewing = renew, asked

    def _look(self) -> None:
        """Ask what was taken away; not to wait for the next renewal, as no hint may come."""
        now = time.monotonic()
        if self._renewing is not None or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        held = self.all_held()
        if not held:
            return
        ids = {rollout_id for rollout_id, _ in held}
        node = next(iter(held.values())).claim.node
        try:
            taken = self._store.read(lambda connection: leases.taken(connection, self.owner, node, ids), patience_s=0.0)
        except StoreUnavailable:
            return
        for (rollout_id, _), each in held.items():
            if rollout_id in taken:
                each.stop("cancelled" if taken[rollout_id] == State.CANCELLED else "lost")


def _named(message: str) -> set[str]:
    """The rollouts that a hint names; none if somebody else's message came in."""
    try:
        found = json.loads(message)
    except ValueError:
        return set()
    return {each for each in found if isinstance(each, str)} if isinstance(found, list) else set()
