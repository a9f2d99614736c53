"""The Celery app of the workers: its settings, each with its reason, and the steps added to Celery's worker.

`farm.scheduler.broker` has the settings shared with clients.

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

import logging
import os
import signal
import time
import warnings
from types import FrameType
from typing import Any

from celery import bootsteps
from celery.apps.worker import install_worker_term_handler
from celery.platforms import SecurityWarning
from celery.signals import setup_logging, worker_init, worker_ready, worker_shutdown, worker_shutting_down
from kombu.transport import TRANSPORT_ALIASES

from farm.records.rollout import Stage
from farm.scheduler.broker import celery_app
from farm.settings import settings
from workers import logs
from workers.plugins.plugin_faults import described, is_exhausted
from workers.process.supervision import EXHAUSTED, FINISH, HAND_BACK, ready_file

log = logging.getLogger(__name__)
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


# root is allowed: a farm of root runs its sandboxes as another user, and reads no pickle
warnings.simplefilter("ignore", SecurityWarning)

app = celery_app(settings().broker_url, "workers")
app.conf.update(
    include=["workers.queue.tasks"],
    # early acknowledgement: a late one duplicates running work whenever the connection breaks
    task_acks_late=False,
    task_reject_on_worker_lost=False,
    worker_prefetch_multiplier=1,
    # admission limits the queues already; fetching only for free slots would cost a second at every refill
    worker_disable_prefetch=False,
    # with RabbitMQ, the reduction leaves a reconnected worker that consumes nothing
    worker_enable_prefetch_count_reduction=False,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    # a malformed message must not end the worker or its stages
    worker_consumer="workers.queue.message_filter:StageConsumer",
    # Flower's view of the stages
    worker_send_task_events=True,
    # otherwise anything that reaches the broker could stop a worker or change its queue or rate, unknown to the farm
    worker_enable_remote_control=False,
    worker_redirect_stdouts=False,
)

app.steps["worker"].add(ShutdownSignals)
app.steps["consumer"].add(BatchedEvents)
TRANSPORT_ALIASES.update(dict.fromkeys(("redis", "rediss"), "workers.queue.message_filter:RedisTransport"))


@setup_logging.connect  # type: ignore[untyped-decorator]
def _log(**_: Any) -> None:
    """Replace Celery's own logging setup."""
    logs.set_up(settings())


@worker_ready.connect  # type: ignore[untyped-decorator]
def _hear(**_: Any) -> None:
    """Tell the node's supervisor that this worker consumes its queue."""
    ready_file(settings().scratch, os.getpid()).touch()


@worker_init.connect  # type: ignore[untyped-decorator]
def _open(**_: Any) -> None:
    """Prepare before the first task, or end the process: Celery would log an exception and go on without a worker."""
    try:
        from workers.process.worker import worker

        worker()
        if settings().pool == Stage.INIT and settings().warm_pool:
            from workers.process.warm_pool_filler import warm_pool_filler

            warm_pool_filler().start()
    except Exception as error:
        log.critical("Worker start failed: %s", described(error))
        logging.shutdown()
        # a normal exit would wait for the threads started so far
        os._exit(EXHAUSTED if is_exhausted(error) else 1)


@worker_shutting_down.connect  # type: ignore[untyped-decorator]
def _drain(sig: int, **_: Any) -> None:
    """Start nothing more. Celery waits for the running tasks, which end immediately if they are requeued."""
    from workers.process.warm_pool_filler import warm_pool_filler
    from workers.process.worker import worker

    if warm_pool_filler.cache_info().currsize:
        warm_pool_filler().stop()
    if sig == HAND_BACK and worker.made is not None:
        worker().leases.drain()


@worker_shutdown.connect  # type: ignore[untyped-decorator]
def _close(**_: Any) -> None:
    from workers.process.worker import worker

    if worker.made is not None:
        worker().close()
