"""The raw operation to hold the farm against: a plain Celery chain of three empty tasks, no store, no record."""

from __future__ import annotations

import os

from celery import Celery

app = Celery("plain", broker=os.environ.get("PLAIN_BROKER", ""))
app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True)
DONE = "plain:done"


@app.task(name="plain.first")  # type: ignore[untyped-decorator]
def first() -> None:
    pass


@app.task(name="plain.second")  # type: ignore[untyped-decorator]
def second() -> None:
    pass


@app.task(name="plain.third")  # type: ignore[untyped-decorator]
def third() -> None:
    from farm.signals import redis_client

    client = redis_client(os.environ["PLAIN_BROKER"])
    assert client is not None
    client.incr(DONE)
