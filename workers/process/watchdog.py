"""Ends a worker process that hangs: its event loop does not answer, its threads are all stuck, or its stages are.

It ends one, too, that can start no thread, open no file or get no memory any more: whatever such a process is sent
would be lost in it while its node counts as healthy. It is replaced; if that does not help, its node is given nothing
more.

A coroutine that never yields stops all others, and cancels with them, so only another thread can notice, and only the
process's end helps. What it holds is handed back before. The rollout whose code keeps the loop or the threads busy has
failed, and is counted like any other failure; the others are handed back at no cost. If it cannot be identified, all
of them count it as a loss, so that what hangs its worker again and again comes to an end.

Code that does not even let go of the interpreter's lock, as a regular expression can, stops that thread too: then a
timer of the C library ends the process, and its node gives back what it held, which is a loss as well.
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
from workers.process.claimed_work import StopReason
from workers.process.lease_renewal import Leases
from workers.process.loop import Loop, Running
from workers.process.supervision import EXHAUSTED

log = logging.getLogger(__name__)

_PERIODS = 20
"""Number of times the loop is checked within the time that it may take to answer."""
_TIMER = 3
"""The timer ends the process after so many times the time that the loop may take."""
_THREADS_S = 5
"""So many times as long all threads for what blocks may be busy: they may do honest work."""
_SHARE = 8
"""One stage that hangs in this many that are held is too much: few others lose their work with the process."""
_HAND_BACK_S = 10.0


class Hang(Exception):
    """The work blocked its whole worker, by its event loop or by the threads for what blocks; `str` says how."""

    def __init__(self, message: str, *, in_loop: bool) -> None:
        super().__init__(message)
        self.in_loop = in_loop


class Watchdog:
    """Watches until closed, in a thread of its own. `end` ends the process; it is given its exit status."""

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
        # periods are counted, not seconds: a process that was frozen for an hour was not checked for an hour
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
                self._end_drained()
                return
            answered = self._ask() if answered.is_set() else answered
            blocked = self._loop.block(_nothing) if blocked.done() else blocked

    def _arm(self) -> None:
        # it is a thread too, and one that is missing is noticed elsewhere
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
        how = f"it blocked the event loop of its worker for {self._stall_s:g} s in {where}"
        self._end_for(culprits, Hang(how, in_loop=True))

    def _end_stuck(self) -> None:
        stuck_s = self._stall_s * _THREADS_S
        log.error("No thread for blocking calls was free for %g s", stuck_s)
        faulthandler.dump_traceback()
        culprits = self._loop.in_threads(time.monotonic() - stuck_s)
        how = f"it kept threads of its worker busy for {stuck_s:g} s, and none was left for others"
        self._end_for(culprits, Hang(how, in_loop=False))

    def _end_for(self, culprits: set[Running[Any]], hang: Hang) -> None:
        """The rollouts that hang have failed; the others lose what they have played, and that is no failure."""
        for culprit in culprits:
            culprit.abandon(hang)
        self._leases.abandon(StopReason.STALLED if culprits else StopReason.HUNG)
        self._finish()

    def _end_drained(self) -> None:
        faulthandler.dump_traceback()
        self._leases.drain()
        self._wait(self._stall_s)
        self._leases.abandon(StopReason.STALLED)
        self._finish()

    def _end_exhausted(self) -> None:
        log.error("Worker exits: no threads, descriptors or memory left (%s)", self._exhausted)
        self._leases.drain()
        self._wait(_HAND_BACK_S)
        self._leases.abandon(StopReason.STALLED)
        self._finish(EXHAUSTED)

    def _finish(self, status: int = 1) -> None:
        """Do not wait long for a store that is away: the node gives back what an ended process held."""
        self._wait(_HAND_BACK_S)
        log.error("Worker exits without releasing %d rollouts", len(self._leases.all_held()))
        self._end(status)

    def _wait(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while self._leases.all_held() and time.monotonic() < deadline:
            self._arm()
            self._closed.wait(0.05)


def _try_resources() -> None:
    """Start a thread and open a file. RuntimeError or OSError if there are none left."""
    probe = threading.Thread(target=_nothing, daemon=True)
    probe.start()
    probe.join()
    with open(os.devnull, "rb"):  # noqa: PTH123 - nothing more than a descriptor is wanted
        pass


def _nothing() -> None:
    pass
