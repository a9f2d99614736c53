"""The work on one claim of this process, and the reasons for stopping it from outside."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from farm.store.rollouts import Claim
from workers.process.loop import Running
from workers.stage_clock import StageClock

log = logging.getLogger(__name__)


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
    def is_overdue(self) -> bool:
        return (
            self._work is not None
            and not self._work.future.done()
            and time.monotonic() - self._began_at > self.limit_s + self.excused_s() + self.clock.stopped_s
        )

    def extend_deadline(self, time_s: float) -> None:
        """Shift its start and stop times by `time_s`."""
        with self._lock:
            self._began_at += time_s
            self._stopped_at += time_s if self._stopped_at else 0.0

    def is_unresponsive(self, patience_s: float) -> bool:
        """Return whether the work is still running `patience_s` after it was stopped."""
        return (
            self._work is not None
            and not self._work.future.done()
            and bool(self._stopped_at)
            and time.monotonic() - self._stopped_at > patience_s
        )

    @property
    def is_leaked(self) -> bool:
        """True if no thread waits for the work any longer, but it has not ended."""
        return self._work is not None and self._work.future.done() and not self._work.ended
