"""The steps that the farm adds to Celery's worker: batched task events, and the signals that end a worker process.

Task events, for Flower, are sent only while there are listeners, and once a second instead of once for each event.
Celery publishes each event immediately, which at hundreds of rollouts a second takes a third of a worker's CPU time. A
display for people may be a second old.

Redis answers each event with the number of its listeners. The worker's own events, such as its heartbeat every two
seconds, are always sent, so one of them reveals when listening starts or ends. RabbitMQ does not report listeners, and
gets all events.

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

_PERIOD_S = 1.0
_TASK, _WORKER = "task", "worker"
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SHUTDOWN_NOTICE_S = 120.0
"""Time after such a signal in which errors are attributed to it. A worker that runs longer was not its target."""
_shutdown_requested_at: list[float] = []


class EventListeners:
    """The number of listeners to this process's events, as the broker counted them at the last one."""

    def __init__(self) -> None:
        self._groups: set[str] = set()

    def wait_for(self, dispatcher: Any) -> None:
        """Let a dispatcher send only events with listeners. Its groups of events are those of remote control."""
        self._groups = dispatcher.groups

    def counted(self, n: int) -> None:
        """Record the number of receivers of an event."""
        self._groups.add(_WORKER)
        if n:
            self._groups.add(_TASK)
        else:
            self._groups.discard(_TASK)


listeners = EventListeners()


class BatchedEvents(bootsteps.StartStopStep):  # type: ignore[misc]
    """A step of the worker's consumer that flushes its events periodically, or when Celery's own buffer is full."""

    requires = ("celery.worker.consumer.events:Events",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._timer: Any = None

    def start(self, consumer: Any) -> None:
        if consumer.hub is not None and consumer.event_dispatcher is not None:
            consumer.event_dispatcher.on_send_buffered = None
            listeners.wait_for(consumer.event_dispatcher)
            self._timer = consumer.hub.call_repeatedly(_PERIOD_S, consumer.event_dispatcher.flush)

    def stop(self, consumer: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ShutdownSignals(bootsteps.StartStopStep):  # type: ignore[misc]
    """Lets only a supervisor end this process.

    Replaces Celery's own handlers, which exist when the worker's steps start.
    """

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
