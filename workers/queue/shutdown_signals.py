"""The signals by which a supervisor alone ends a worker process.

A node's end may come as a signal to all of its processes at once, as Slurm can send it and systemd does. If the
workers obeyed that too, none would be left to play on through the node's grace. So they ignore it, and the supervisor
has two signals of its own. A worker notes the time of the others: what breaks just then breaks because all are ended.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

from celery import bootsteps
from celery.apps.worker import install_worker_term_handler

from workers.process.supervision import FINISH, HAND_BACK

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SHUTDOWN_NOTICE_S = 120.0
"""Seconds after such a signal; a worker that still runs then was not meant by it."""
_shutdown_requested_at: list[float] = []


class ShutdownSignals(bootsteps.StartStopStep):  # type: ignore[misc]
    """Takes the place of Celery's own handlers, which are there when the worker's steps start."""

    def start(self, parent: Any) -> None:
        for number in _IGNORED:
            # not SIG_IGN, which every program that is started from here would inherit
            signal.signal(number, _ignore)
        for ours in (FINISH, HAND_BACK):
            install_worker_term_handler(parent, sig=ours, verbose=False)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Note the time; the supervisor got the signal too."""
    _shutdown_requested_at[:] = [time.monotonic()]


def shutdown_requested() -> bool:
    """Return whether all processes of this node were signalled to end a moment ago."""
    return bool(_shutdown_requested_at) and time.monotonic() - _shutdown_requested_at[0] < SHUTDOWN_NOTICE_S
