"""The claims of one worker process: renewed together, released if they are cancelled, lost or overdue.

While the store is unavailable, no other worker can claim either, so work continues; the store decides when it is back.
Deadlines are enforced here a second time, from outside the work: a stage that runs long after its limit is stopped, and
abandoned if it does not end then either.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from farm.errors import StoreUnavailable
from farm.notifications import CANCELLED, Listener, Signals
from farm.records.rollout import State
from farm.store import leases
from farm.store.database import Store
from farm.store.rollouts import Claim
from workers.process.loop import Running
from workers.stage_clock import StageClock

log = logging.getLogger(__name__)

_LATE_S = 30.0
"""Minimum pause that counts as a suspension of the process; an unresponsive broker does not delay a turn that long."""
_PERIOD_S = 0.5
"""Seconds between rounds. Each looks for lost claims, because a canceller may not reach the broker to notify."""
_SOON_S = 0.1
"""Seconds between checks of an unanswered renewal, and minimum time between reads triggered by notifications."""


class StopReason(StrEnum):
    """The reason why work on a claim was stopped from outside. `UnfinishedStage.stopped` handles each."""

    CANCELLED = "cancelled"
    """Its rollout was cancelled."""
    LOST = "lost"
    """The claim was taken away, or has come back to this process as another attempt."""
    DRAINED = "drained"
    """Its node or its worker shuts down in good order."""
    OVERDUE = "overdue"
    """It exceeded the time limit of its stage."""
    STALLED = "stalled"
    """The process is about to end because other work blocks it."""
    HUNG = "hung"
    """The process is about to end because it hangs, possibly through this work."""


_NOT_HELD = (StopReason.CANCELLED, StopReason.LOST)
_PROCESS_ENDS = (StopReason.STALLED, StopReason.HUNG)


@dataclass(slots=True)
class ClaimedWork:
    """A claim and its work, which is stopped for a `reason`, or because it takes longer than `limit_s` by its clock.

    Seconds counted by `excused_s` do not count against the limit either.
    """

    claim: Claim
    reason: StopReason | None = None
    limit_s: float = math.inf
    excused_s: Callable[[], float] = field(default=lambda: 0.0)
    clock: StageClock = field(default_factory=StageClock)
    _work: Running[Any] | None = None
    _began_at: float = 0.0
    _stopped_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def working(self, work: Running[Any]) -> None:
        """Record the running work. It is stopped immediately if a stop was requested before."""
        with self._lock:
            self._work, self._began_at = work, time.monotonic()
            if self.reason is not None:
                self._end()

    def stop(self, reason: StopReason) -> None:
        """Stop the work, unless it was stopped or has ended. If it has ended, its result must still be written."""
        with self._lock:
            if self.reason is not None or (self._work is not None and self._work.future.done()):
                return
            log.info("Rollout %s: stopping stage %s (%s)", self.claim.rollout_id, self.claim.stage, reason)
            self.reason = reason
            if self._work is not None:
                self._end()

    def abandon(self) -> None:
        """Stop waiting for the end of work that was stopped."""
        with self._lock:
            if self._work is not None:
                self._work.abandon(asyncio.CancelledError())

    def _end(self) -> None:
        assert self._work is not None
        self._stopped_at = time.monotonic()
        if self.reason in _PROCESS_ENDS:
            self._work.abandon(asyncio.CancelledError())
        else:
            self._work.cancel()

    @property
    def _is_running(self) -> bool:
        return self._work is not None and not self._work.future.done()

    @property
    def is_overdue(self) -> bool:
        ran_s = time.monotonic() - self._began_at
        return self._is_running and ran_s > self.limit_s + self.excused_s() + self.clock.stopped_s

    def extend_deadline(self, time_s: float) -> None:
        """Shift its start and stop times by `time_s`."""
        with self._lock:
            self._began_at += time_s
            self._stopped_at += time_s if self._stopped_at else 0.0

    def is_unresponsive(self, patience_s: float) -> bool:
        """Return whether the work is still running `patience_s` after it was stopped."""
        return self._is_running and bool(self._stopped_at) and time.monotonic() - self._stopped_at > patience_s

    @property
    def is_leaked(self) -> bool:
        """True if no thread waits for the work any longer, but it has not ended."""
        return self._work is not None and self._work.future.done() and not self._work.ended


class Leases:
    """Renews the claims that are `held` until closed, in its own thread.

    Work that does not end after it was stopped is abandoned after `stall_s`.
    """

    def __init__(self, store: Store, signals: Signals, owner: str, lease_s: float, stall_s: float) -> None:
        self.owner = owner
        self.draining = False
        self._store = store
        self._signals = signals
        self._lease_s = lease_s
        self._stall_s = stall_s
        self._held: dict[tuple[str, int], ClaimedWork] = {}
        self._abandoned: list[ClaimedWork] = []
        self._lock = threading.Lock()
        self._renewing: tuple[Future[set[str]], Mapping[tuple[str, int], ClaimedWork]] | None = None
        self._renew_at = time.monotonic() + lease_s / 3
        self._looked_at = self._look_at = 0.0
        self._turned_at = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    @contextmanager
    def hold(self, claim: Claim) -> Iterator[ClaimedWork]:
        """Keep a claim alive while the body runs."""
        held, key = ClaimedWork(claim), (claim.rollout_id, claim.attempt)
        with self._lock:
            earlier = [each for (rollout_id, _), each in self._held.items() if rollout_id == claim.rollout_id]
            self._held[key] = held
            if self.draining:
                held.stop(StopReason.DRAINED)
        for each in earlier:
            # it was taken away, and has come back here as another attempt
            each.stop(StopReason.LOST)
        try:
            yield held
        finally:
            with self._lock:
                del self._held[key]

    def all_held(self) -> Mapping[tuple[str, int], ClaimedWork]:
        with self._lock:
            return dict(self._held)

    @property
    def n_hanging(self) -> int:
        """Number of abandoned stages that have not ended."""
        with self._lock:
            self._abandoned = [each for each in self._abandoned if each.is_leaked]
            return len(self._abandoned)

    def drain(self) -> None:
        """Stop all work, accept no more, and requeue it."""
        self.draining = True
        for held in self.all_held().values():
            held.stop(StopReason.DRAINED)

    def abandon(self, reason: StopReason) -> None:
        """Release all work immediately, even if it does not end, because the process is about to exit."""
        self.draining = True
        for held in self.all_held().values():
            held.stop(reason)
            held.abandon()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        with closing(self._signals.listen(CANCELLED)) as listener:
            while not self._closed.is_set():
                try:
                    self._turn(listener)
                except Exception:
                    # whatever the error, without this thread every claim of the process would be lost
                    log.exception("Lease renewal failed; retrying")
                    self._closed.wait(_PERIOD_S)

    def _turn(self, listener: Listener) -> None:
        if listener.wait(self._pause_s()):
            # the sender is unknown, so a notification only triggers a rate-limited read of the store
            self._look_at = min(self._look_at, self._looked_at + _SOON_S)
        self._renew()
        self._extend_deadlines()
        self._stop_overdue()
        self._look()

    def _pause_s(self) -> float:
        if self._renewing is not None:
            return _SOON_S
        return max(0.0, min(_PERIOD_S, self._lease_s / 12, self._look_at - time.monotonic()))

    def _extend_deadlines(self) -> None:
        """Extend deadlines by the time in which this process was suspended."""
        late_s = time.monotonic() - self._turned_at - _PERIOD_S
        self._turned_at = time.monotonic()
        if late_s > _LATE_S:
            for held in self.all_held().values():
                held.extend_deadline(late_s)

    def _stop_overdue(self) -> None:
        for held in self.all_held().values():
            if held.is_overdue:
                held.stop(StopReason.OVERDUE)
            if held.is_unresponsive(self._stall_s):
                where = f"{held.claim.rollout_id}: stage {held.claim.stage}"
                log.error(
                    "Stage of %s was stopped (%s) and has not ended after %g s", where, held.reason, self._stall_s
                )
                held.abandon()
                with self._lock:
                    self._abandoned.append(held)

    def _renew(self) -> None:
        """Process the result of a renewal, or start one. If the store is unavailable, the result comes later."""
        if self._renewing is not None:
            future, renewed = self._renewing
            if not future.done():
                return
            self._renewing = None
            kept = future.result()
            for (rollout_id, _), held in renewed.items():
                if rollout_id not in kept:
                    held.stop(StopReason.LOST)
        if time.monotonic() >= self._renew_at:
            self._renew_at = time.monotonic() + self._lease_s / 3
            renewed = {key: held for key, held in self.all_held().items() if held.reason not in _NOT_HELD}
            if renewed:
                ids = {rollout_id for rollout_id, _ in renewed}
                owner, lease_s = self.owner, self._lease_s
                renew = self._store.submit(
                    lambda connection: leases.renew(connection, owner, ids, lease_s), urgent=True
                )
                self._renewing = renew, renewed

    def _look(self) -> None:
        """Check for lost claims between renewals, because there may be no notification."""
        now = time.monotonic()
        if self._renewing is not None or now < self._look_at:
            return
        self._looked_at, self._look_at = now, now + _PERIOD_S
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
                each.stop(StopReason.CANCELLED if taken[rollout_id] == State.CANCELLED else StopReason.LOST)
