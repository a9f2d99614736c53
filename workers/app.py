"""The Celery app of the workers and its settings, each with its reason; `farm.queue` holds those that clients share."""

from __future__ import annotations

from typing import Any

from celery.signals import worker_init, worker_shutdown, worker_shutting_down
from kombu.transport import TRANSPORT_ALIASES

from farm.queue import celery_app, is_rabbitmq
from farm.rollout import Stage
from farm.settings import settings
from workers.endings import HAND_BACK, Endings
from workers.events import BatchedEvents

app = celery_app(settings().broker_url, "workers")
app.conf.update(
    include=["workers.tasks"],
    # early acknowledgement: a late one doubles running work whenever the connection breaks
    task_acks_late=False,
    task_reject_on_worker_lost=False,
    worker_prefetch_multiplier=1,
    # admission bounds the queues already; fetching only for free slots would cost a second at every refill
    worker_disable_prefetch=False,
    # with RabbitMQ the reduction leaves a reconnected worker that consumes nothing
    worker_enable_prefetch_count_reduction=False,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    # a poisoned message ends neither the worker nor what it plays
    worker_consumer="workers.intake:Consumer",
    # Flower's view of the stages
    worker_send_task_events=True,
    worker_hijack_root_logger=False,
    worker_redirect_stdouts=False,
    # an exclusive queue is locked for as long as a RabbitMQ takes a worker's dead connection for alive, and that worker
    # would begin anew several times a second meanwhile; one that is neither exclusive nor durable it no longer wants
    control_queue_exclusive=not is_rabbitmq(settings().broker_url),
    control_queue_durable=is_rabbitmq(settings().broker_url),
)

app.steps["worker"].add(Endings)
app.steps["consumer"].add(BatchedEvents)
TRANSPORT_ALIASES.update(dict.fromkeys(("redis", "rediss"), "workers.intake:RedisTransport"))


@worker_init.connect  # type: ignore[untyped-decorator]
def _open(**_: Any) -> None:
    """Be ready before the first task, and fail now if the store is not."""
    from workers.worker import worker

    worker()
    if settings().pool == Stage.INIT and settings().stock:
        from workers.stocker import stocker

        stocker().start()


@worker_shutting_down.connect  # type: ignore[untyped-decorator]
def _drain(sig: int, **_: Any) -> None:
    """Begin nothing more; Celery waits for the tasks that run, and if they are to be handed back these end at once."""
    from workers.stocker import stocker
    from workers.worker import worker

    if stocker.cache_info().currsize:
        stocker().stop()
    if sig == HAND_BACK and worker.cache_info().currsize:
        worker().leases.drain()


@worker_shutdown.connect  # type: ignore[untyped-decorator]
def _close(**_: Any) -> None:
    from workers.worker import worker

    if worker.cache_info().currsize:
        worker().close()
