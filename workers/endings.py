"""How a worker process is ended: by its supervisor alone, with two signals that nobody else sends.

Who ends a node may tell all of its processes at once, as Slurm can and systemd does. If the workers heeded that too,
there would be nobody left to play on through the node's grace. So they do not, and the supervisor has signals of its
own for them.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from celery import bootsteps
from celery.apps.worker import install_worker_term_handler

FINISH: int = signal.SIGRTMIN + 1
"""Begin nothing more, play what has begun to its end, then end."""
HAND_BACK: int = signal.SIGRTMIN + 2
"""Stop what is played, put it back into the queue, then end."""
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Endings(bootsteps.StartStopStep):  # type: ignore[misc]
    """Takes the place of Celery's own handlers, which are there when the worker's steps start."""

    def start(self, parent: Any) -> None:
        for number in _IGNORED:
            # not SIG_IGN, which every program that is started from here would inherit
            signal.signal(number, _ignore)
        for ours in (FINISH, HAND_BACK):
            install_worker_term_handler(parent, sig=ours)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The supervisor was told too."""
