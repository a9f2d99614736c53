"""Ends a worker process that hangs: its event loop does not answer, or all its threads or too many stages are stuck.

It also ends a process that cannot start a thread, open a file or get memory: messages sent to such a process would be
lost while its node counts as healthy. The supervisor replaces the process; if that does not help, the node gets no more
work.

A coroutine that never yields stops all others and their cancellation, so only another thread can notice, and only the
end of the process helps. Its claims are requeued before. The rollout whose code blocks the loop or the threads has
failed, and counts like any other failure; the others are requeued at no cost. If it cannot be identified, all of them
count as lost once, so that a rollout that hangs its worker again and again comes to an end.

Code that holds the interpreter's lock, such as a regular expression, stops this thread, too. Then a timer of the C
library ends the process, and its node requeues the claims, which also count as lost.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from workers.plugins.plugin_faults import described, is_exhausted
from workers.process.lease_renewal import Leases, StopReason
from workers.process.loop import Loop, Running
from workers.process.supervision import EXHAUSTED

log = logging.getLogger(__name__)

_PERIODS = 20
"""Number of checks of the loop within the time in which it must answer."""
_TIMER = 3
"""The timer ends the process after this multiple of the loop's time limit."""
_THREADS_S = 5
"""The multiple of that time for which all threads for blocking calls may be busy, because they may do real work."""
_SHARE = 8
"""If more than one in this many stages hangs, the process ends: few others lose their work with it."""
_HAND_BACK_S = 10.0


class Hang(Exception):
    """The work blocked its whole worker, in its event loop or its threads for blocking calls; `str` tells how."""

    def __init__(self, message: str, *, in_loop: bool) -> None:
        super().__init__(message)
        self.in_loop = in_loop


class Watchdog:
    """Watches until closed, in its own thread. `end` ends the process with its argument as exit status."""

    def __init__(self, loop: Loop, leases: Leases, stall_s: float, end: Callable[[int], None] = os._exit) -> None:
        self._loop = loop
        self._leases = leases
        self._stall_s = stall_s
        self._end = end
        self._exhausted = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=self._stall_s / _PERIODS + 1.0)
        faulthandler.cancel_dump_traceback_later()

    def exhausted(self, error: BaseException) -> None:
        """End a process without threads, descriptors or memory soon; it claims nothing more. From any thread."""
        self._exhausted = self._exhausted or described(error)
        self._leases.draining = True

    def _run(self) -> None:
        try:
            self._watch()
        except (RuntimeError, OSError, MemoryError) as error:
            if not is_exhausted(error):
                raise
            self.exhausted(error)
            self._end_exhausted()

    def _watch(self) -> None:
        answered, blocked = self._ask(), self._loop.block(_nothing)
        n_silent = n_stuck = 0
        # count periods, not seconds: a process that was suspended for an hour was not checked for an hour
        while not self._closed.wait(self._stall_s / _PERIODS):
            self._arm()
            _try_resources()
            if self._exhausted:
                self._end_exhausted()
                return
            n_silent = 0 if answered.is_set() else n_silent + 1
            n_stuck = 0 if blocked.done() else n_stuck + 1
            if n_silent >= _PERIODS:
                self._end_stalled()
                return
            if n_stuck >= _PERIODS * _THREADS_S:
                self._end_stuck()
                return
            if self._leases.n_hanging * _SHARE > len(self._leases.all_held()):
                log.error("%d abandoned stages are still running", self._leases.n_hanging)
                faulthandler.dump_traceback()
                self._end_drained(self._stall_s)
                return
            answered = self._ask() if answered.is_set() else answered
            blocked = self._loop.block(_nothing) if blocked.done() else blocked

    def _arm(self) -> None:
        # it needs a thread; if none can be started, `_try_resources` notices
        with suppress(RuntimeError):
            faulthandler.dump_traceback_later(_TIMER * self._stall_s, exit=True)

    def _ask(self) -> threading.Event:
        answered = threading.Event()
        self._loop.call(answered.set)
        return answered

    def _end_stalled(self) -> None:
        stack, culprit = self._loop.stack(), self._loop.at_work()
        log.error("Event loop has not answered for %g s; its stack:\n%s", self._stall_s, "".join(stack))
        where = " ".join(stack[-1].split()) if stack else "an unknown place"
        culprits = {culprit} if culprit is not None else set()
        how = f"blocked the event loop of its worker for {self._stall_s:g} s in {where}"
        self._end_for(culprits, Hang(how, in_loop=True))

    def _end_stuck(self) -> None:
        stuck_s = self._stall_s * _THREADS_S
        log.error("No thread for blocking calls was free for %g s", stuck_s)
        faulthandler.dump_traceback()
        culprits = self._loop.in_threads(time.monotonic() - stuck_s)
        how = f"kept threads of its worker busy for {stuck_s:g} s, so that none was left for others"
        self._end_for(culprits, Hang(how, in_loop=False))

    def _end_for(self, culprits: set[Running[Any]], hang: Hang) -> None:
        """Fail the hanging rollouts. The others lose their progress, which does not count as a failure."""
        for culprit in culprits:
            culprit.abandon(hang)
        self._leases.abandon(StopReason.STALLED if culprits else StopReason.HUNG)
        self._finish()

    def _end_exhausted(self) -> None:
        log.error("Worker exits: no threads, descriptors or memory left (%s)", self._exhausted)
        self._end_drained(_HAND_BACK_S, EXHAUSTED)

    def _end_drained(self, patience_s: float, status: int = 1) -> None:
        self._leases.drain()
        self._wait(patience_s)
        self._leases.abandon(StopReason.STALLED)
        self._finish(status)

    def _finish(self, status: int = 1) -> None:
        """End the process without a long wait for the store: the node requeues the claims of an ended process."""
        self._wait(_HAND_BACK_S)
        log.error("Worker exits without releasing %d rollouts", len(self._leases.all_held()))
        self._end(status)

    def _wait(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while self._leases.all_held() and time.monotonic() < deadline:
            self._arm()
            self._closed.wait(0.05)


def _try_resources() -> None:
    """Start a thread and open a file. Raises RuntimeError or OSError if none are left."""
    probe = threading.Thread(target=_nothing, daemon=True)
    probe.start()
    probe.join()
    with open(os.devnull, "rb"):  # noqa: PTH123 - nothing more than a descriptor is wanted
        pass


def _nothing() -> None:
    pass
