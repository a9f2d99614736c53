"""A worker process of one stage: Celery's worker without Celery's command line, which also loads Flower and a shell."""

from __future__ import annotations

from celery.concurrency.thread import TaskPool

from farm.records.rollout import Stage
from farm.scheduler.broker import queue_name
from farm.settings import settings
from farm.startup import limit_full_collections
from workers.queue import message_filter, tasks  # noqa: F401 - the app names them, and would load them later
from workers.queue.app import app


def run_worker(name: str, slots: int) -> int:
    """Serve the queue of this process's pool until its supervisor ends it; return the exit status.

    `name` is STAGE@NODE, which Celery shows, and `slots` the number of concurrent stages.
    """
    worker = app.Worker(
        # Celery would expand percent signs
        hostname=name.replace("%", "%%"),
        queues=[queue_name(Stage(settings().pool), settings().node)],
        concurrency=slots,
        pool_cls=TaskPool,
        loglevel="WARNING",
        task_events=True,
        without_gossip=True,
        without_mingle=True,
        quiet=True,
    )
    limit_full_collections()
    worker.start()
    return int(worker.exitcode or 0)
