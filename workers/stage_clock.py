"""The clock of a stage: it runs while the stage works, and stands still while it waits for what it shares with others.

Images, environments, archives and prepared layers are made once for all rollouts of a node, or of all nodes that share
a home. Each making has a limit of its own, so none of its time is on the clock of a stage: neither for the one that
happens to make it nor for those that wait. A wait that goes on beyond what makings may take is on the clock again, so
that nothing waits for ever. All deadlines of a stage go by this clock: `workers/stages/stage_job.py`,
`workers/stages/run_clock.py`, and the lease's (`workers/process/lease_renewal.py`).
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

_MIN_WAIT_S = 0.05


class StageClock:
    """Counts the time in which the clock of one stage stands still. For any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._lock = threading.Lock()
        self._waits: dict[int, float] = {}
        self._n_waits = 0
        self._stopped_s = 0.0
        self._counted_until = now()

    @property
    def stopped_s(self) -> float:
        """For how long it has stood still until now; time in which two waits go on counts once."""
        with self._lock:
            return self._count()

    @contextmanager
    def stopped(self, most_s: float) -> Iterator[None]:
        """Let it stand still while the block runs, for `most_s` seconds at most."""
        with self._lock:
            self._count()
            self._n_waits += 1
            number = self._n_waits
            self._waits[number] = self._counted_until + most_s
        try:
            yield
        finally:
            with self._lock:
                self._count()
                del self._waits[number]

    @contextmanager
    def as_current(self) -> Iterator[StageClock]:
        """Make it that of all that the block does, in its tasks and in `asyncio.to_thread` too."""
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)

    def _count(self) -> float:
        """Count up to now; since it was last done, no wait has begun or ended."""
        now, until = self.now(), max(self._waits.values(), default=-math.inf)
        self._stopped_s += max(0.0, min(now, until) - self._counted_until)
        self._counted_until = now
        return self._stopped_s


_CURRENT: ContextVar[StageClock | None] = ContextVar("stage_clock", default=None)


@contextmanager
def off_clock(most_s: float) -> Iterator[None]:
    """Let the clock of the stage that this belongs to stand still, if it belongs to one, for `most_s` at most.

    Deadlines within the block go by a clock of their own.
    """
    clock = _CURRENT.get()
    if clock is None:
        yield
        return
    with clock.stopped(most_s), StageClock(clock.now).as_current():
        yield


def stopped_s() -> float:
    """For how long the clock of the stage that this belongs to has stood still; 0 outside of a stage."""
    clock = _CURRENT.get()
    return clock.stopped_s if clock is not None else 0.0


@asynccontextmanager
async def deadline(limit_s: float | None) -> AsyncIterator[None]:
    """Raise TimeoutError once the block has taken longer than `limit_s`, by the stage's clock; never if it is None."""
    loop = asyncio.get_running_loop()
    with (_CURRENT.get() or StageClock()).as_current() as clock:
        async with asyncio.timeout(None) as timeout:
            began_at, stopped_before_s = loop.time(), clock.stopped_s
            timer: asyncio.TimerHandle | None = None

            def look(limit_s: float) -> None:
                nonlocal timer
                left_s = limit_s + clock.stopped_s - stopped_before_s - (loop.time() - began_at)
                if left_s <= 0:
                    timeout.reschedule(loop.time())
                else:
                    timer = loop.call_later(max(left_s, _MIN_WAIT_S), look, limit_s)

            if limit_s is not None:
                look(limit_s)
            try:
                yield
            finally:
                if timer is not None:
                    timer.cancel()
