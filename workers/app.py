"""The Celery app of the workers and its settings, each with its reason; `farm.queue` holds those that clients share."""

from __future__ import annotations

from typing import Any

from celery.signals import worker_init, worker_shutdown, worker_shutting_down

from farm.queue import celery_app
from farm.rollout import Stage
from farm.settings import settings
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
    # Flower's view of the stages
    worker_send_task_events=True,
    worker_hijack_root_logger=False,
    worker_redirect_stdouts=False,
)

app.steps["consumer"].add(BatchedEvents)


@worker_init.connect  # type: ignore[untyped-decorator]
def _open(**_: Any) -> None:
    """Be ready before the first task, and fail now if the store is not."""
    from workers.worker import worker

    worker()
    if settings().pool == Stage.INIT and settings().stock:
        from workers.stocker import stocker

        stocker().start()


@worker_shutting_down.connect  # type: ignore[untyped-decorator]
def _drain(**_: Any) -> None:
    """Hand back what runs: Celery's own shutdown waits for the tasks, and these end at once."""
    from workers.stocker import stocker
    from workers.worker import worker

    if stocker.cache_info().currsize:
        stocker().stop()
    if worker.cache_info().currsize:
        worker().leases.drain()


@worker_shutdown.connect  # type: ignore[untyped-decorator]
def _close(**_: Any) -> None:
    from workers.worker import worker

    if worker.cache_info().currsize:
        worker().close()
