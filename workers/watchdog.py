"""Ends a worker process that hangs: its event loop does not answer, its threads are all stuck, or its stages are.

A coroutine that never yields stops all others, and cancels with them, so only another thread can notice, and only the
process's end helps. What it holds is handed back before. Code that does not even let go of the interpreter's lock, as a
regular expression can, stops that thread too: then a timer of the C library ends the process, and its node gives back
what it held.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

from farm.errors import AgentError
from workers.leases import Leases
from workers.loop import Loop

log = logging.getLogger(__name__)

_PERIODS = 20
"""The loop is asked so often within the time that it may take to answer."""
_TIMER = 3
"""The timer ends the process after so many times the time that the loop may take."""
_THREADS_S = 5
"""So many times as long all threads for what blocks may be busy: they may do honest work."""
_SHARE = 8
"""One stage that hangs in this many that are held is too much: few others lose their work with the process."""
_HAND_BACK_S = 10.0


class Watchdog:
    """Watches until closed, in a thread of its own. `end` ends the process; it is given its exit status."""

    def __init__(self, loop: Loop, leases: Leases, stall_s: float, end: Callable[[int], None] = os._exit) -> None:
        self._loop = loop
        self._leases = leases
        self._stall_s = stall_s
        self._end = end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=self._stall_s / _PERIODS + 1.0)
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        answered, blocked = self._ask(), self._loop.block(_nothing)
        n_silent = n_stuck = 0
        # periods are counted, not seconds: a process that was frozen for an hour has not been asked for an hour
        while not self._closed.wait(self._stall_s / _PERIODS):
            faulthandler.dump_traceback_later(_TIMER * self._stall_s, exit=True)
            n_silent = 0 if answered.is_set() else n_silent + 1
            n_stuck = 0 if blocked.done() else n_stuck + 1
            if n_silent >= _PERIODS:
                self._end_stalled()
                return
            if n_stuck >= _PERIODS * _THREADS_S:
                log.error("no thread for what blocks has been free for %g s", self._stall_s * _THREADS_S)
                self._end_drained()
                return
            if self._leases.n_hanging * _SHARE > len(self._leases.all_held()):
                log.error("%d stages hang that nobody waits for any longer", self._leases.n_hanging)
                self._end_drained()
                return
            answered = self._ask() if answered.is_set() else answered
            blocked = self._loop.block(_nothing) if blocked.done() else blocked

    def _ask(self) -> threading.Event:
        answered = threading.Event()
        self._loop.call(answered.set)
        return answered

    def _end_stalled(self) -> None:
        """The rollout that is at work has failed; the others lose what they have played, and that is no failure."""
        stack, culprit = self._loop.stack(), self._loop.at_work()
        log.error("the event loop has not answered for %g s; it is here:\n%s", self._stall_s, "".join(stack))
        if culprit is not None:
            where = " ".join(stack[-1].split()) if stack else "an unknown place"
            culprit.abandon(AgentError(f"it blocked the event loop of its worker for {self._stall_s:g} s in {where}"))
        self._leases.abandon()
        self._finish()

    def _end_drained(self) -> None:
        faulthandler.dump_traceback()
        self._leases.drain()
        self._wait(self._stall_s)
        self._leases.abandon()
        self._finish()

    def _finish(self) -> None:
        """A store that is away is not waited for long: the node gives back what a dead process held."""
        self._wait(_HAND_BACK_S)
        log.error("this worker ends, with %d rollouts not handed back", len(self._leases.all_held()))
        self._end(1)

    def _wait(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while self._leases.all_held() and time.monotonic() < deadline:
            faulthandler.dump_traceback_later(_TIMER * self._stall_s, exit=True)
            self._closed.wait(0.05)


def _nothing() -> None:
    pass
