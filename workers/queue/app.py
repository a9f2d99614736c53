"""The Celery app of the workers and its settings, each with its reason; `farm.scheduler.broker` has those shared with
clients.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

from celery.platforms import SecurityWarning
from celery.signals import setup_logging, worker_init, worker_ready, worker_shutdown, worker_shutting_down
from kombu.transport import TRANSPORT_ALIASES

from farm.records.rollout import Stage
from farm.scheduler.broker import celery_app
from farm.settings import settings
from workers import logs
from workers.plugins.plugin_faults import described, is_exhausted
from workers.process.supervision import EXHAUSTED, HAND_BACK, ready_file
from workers.queue.worker_steps import BatchedEvents, ShutdownSignals

log = logging.getLogger(__name__)

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
