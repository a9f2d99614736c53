"""The baseline for the farm: a plain Celery chain of three empty tasks, without a store.

With `PLAIN_EARLY` set it uses the farm's own transport settings, three times as fast as Celery's defaults, but may lose
a task, as nothing sends it again.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from celery import Celery, chain

from farm.embedded.child_process import ChildProcess
from farm.notifications import redis_client
from farm.scheduler.broker import REDIS


def _app(url: str, early: bool) -> Celery:
    app = Celery("plain", broker=url)
    app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True)
    if early:
        app.conf.broker_transport_options = REDIS
    return app


app = _app(os.environ.get("PLAIN_BROKER", ""), bool(os.environ.get("PLAIN_EARLY")))
DONE = "plain:done"
_WIDTHS = {"first": "8", "second": "64", "third": "8"}


@app.task(name="plain.first")  # type: ignore[untyped-decorator]
def first() -> None:
    pass


@app.task(name="plain.second")  # type: ignore[untyped-decorator]
def second() -> None:
    pass


@app.task(name="plain.third")  # type: ignore[untyped-decorator]
def third() -> None:
    client = redis_client(os.environ["PLAIN_BROKER"])
    assert client is not None
    client.incr(DONE)


@contextmanager
def workers(url: str, log: Path, early: bool = False) -> Iterator[None]:
    """Run three pools, as wide as those of `benchmarks.farm`, on the Redis at `url`."""
    env = os.environ | {"PLAIN_BROKER": url, "PLAIN_EARLY": "1" if early else ""}
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.peers.plain", "worker", "-P", "threads", "-l", "ERROR"]
    command += ["--without-gossip", "--without-mingle", "-E"]
    running = [
        ChildProcess([*command, "-c", width, "-Q", queue, "-n", queue], env=env, log=log)
        for queue, width in _WIDTHS.items()
    ]
    try:
        run_batch(url, 40, early)  # starts the workers up
        yield
    finally:
        for child in running:
            child.terminate()
            child.end(5.0)


def run_batch(url: str, n: int, early: bool = False) -> float:
    """Return the seconds until n chains have run."""
    client = redis_client(url)
    assert client is not None
    client.set(DONE, 0)
    producer = _app(url, early)
    to = {queue: producer.signature(f"plain.{queue}", immutable=True, queue=queue) for queue in _WIDTHS}
    started = time.perf_counter()
    for _ in range(n):
        chain(*to.values()).apply_async()
    while int(client.get(DONE) or 0) < n:
        time.sleep(0.005)
    client.close()
    return time.perf_counter() - started
