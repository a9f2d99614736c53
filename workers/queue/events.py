"""Task events for Flower: sent only while somebody listens, and once a second instead of once for each event.

Celery publishes as soon as an event is buffered, which at hundreds of rollouts a second costs a third of a worker's
CPU time. A view for people loses nothing by being a second old.

Redis answers each event with the number of its listeners. The events of the worker itself, such as its heartbeat every
two seconds, go out always: so it is noticed by one of them that somebody listens, or that nobody does any longer.
RabbitMQ does not say, and gets them all.
"""

from __future__ import annotations

from typing import Any

from celery import bootsteps

_PERIOD_S = 1.0
_TASK, _WORKER = "task", "worker"


class EventListeners:
    """The listeners to the events of this process's worker, as the broker counted them at the last one."""

    def __init__(self) -> None:
        self._groups: set[str] = set()

    def wait_for(self, dispatcher: Any) -> None:
        """Let a dispatcher send what is listened to. Its groups of events are what remote control would set."""
        self._groups = dispatcher.groups

    def counted(self, n: int) -> None:
        """Take note of how many have received an event just now."""
        self._groups.add(_WORKER)
        if n:
            self._groups.add(_TASK)
        else:
            self._groups.discard(_TASK)


listeners = EventListeners()


class BatchedEvents(bootsteps.StartStopStep):  # type: ignore[misc]
    """A step of the worker's consumer: flushes its events by the clock, or when Celery's own buffer is full."""

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
