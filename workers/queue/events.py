"""Task events for Flower: sent only while there are listeners, and once a second instead of once for each event.

Celery publishes each event immediately, which at hundreds of rollouts a second takes a third of a worker's CPU time. A
display for people may be a second old.

Redis answers each event with the number of its listeners. The worker's own events, such as its heartbeat every two
seconds, are always sent, so one of them reveals when listening starts or ends. RabbitMQ does not report listeners, and
gets all events.
"""

from __future__ import annotations

from typing import Any

from celery import bootsteps

_PERIOD_S = 1.0
_TASK, _WORKER = "task", "worker"


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
