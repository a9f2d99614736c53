"""The signals by which only a supervisor ends a worker process.

The end of a node may come as a signal to all of its processes at once, as from Slurm or systemd. If the workers obeyed
it, none would be left for the node's grace period. So they ignore it, and the supervisor has two signals of its own. A
worker records the time of ignored signals: an error shortly afterwards is probably caused by the end of the node.
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
"""Time after such a signal in which errors are attributed to it. A worker that runs longer was not its target."""
_shutdown_requested_at: list[float] = []


class ShutdownSignals(bootsteps.StartStopStep):  # type: ignore[misc]
    """Replaces Celery's own handlers, which exist when the worker's steps start."""

    def start(self, parent: Any) -> None:
        for number in _IGNORED:
            # not SIG_IGN, which every program started from here would inherit
            signal.signal(number, _ignore)
        for ours in (FINISH, HAND_BACK):
            install_worker_term_handler(parent, sig=ours, verbose=False)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Record the time; the supervisor got the signal, too."""
    _shutdown_requested_at[:] = [time.monotonic()]


def shutdown_requested() -> bool:
    """Return whether all processes of this node were recently signalled to end."""
    return bool(_shutdown_requested_at) and time.monotonic() - _shutdown_requested_at[0] < SHUTDOWN_NOTICE_S
