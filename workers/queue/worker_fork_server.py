"""The fork server of a node's workers: it imports their common modules once, and forks each of them.

The imports take a second of CPU time and a hundred megabytes, and a node has three workers; forked processes share
both. The supervisor has threads by then and must not fork, so the server is a separate process with a single thread.

A request is a JSON message on the socket FD, and so is its answer: `{"start": …}` gives `{"pid": …}`, and
`{"ended": PID}` gives `{"code": …}`, null while it runs. The server ends with its supervisor, and its workers with it.

A worker is Celery's worker without Celery's command line, which also loads Flower and a shell.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from types import FrameType

import numpy as np
from celery.app.backends import by_name
from celery.concurrency.thread import TaskPool

from farm.embedded.child_process import die_with_parent
from farm.plugins import installed
from farm.records.rollout import Stage
from farm.scheduler.broker import queue_name
from farm.settings import settings
from farm.startup import end_process, limit_full_collections
from workers.process.supervision import WorkerStart, exit_status
from workers.queue import message_filter, tasks  # noqa: F401 - the app names them, and would load them later
from workers.queue.app import app
from workers.sandboxes.isolation.linux import show_as

_MAX_BYTES = 1_000_000
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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


def serve(control: socket.socket) -> None:
    """Answer requests until the supervisor's end is closed. Returns in the server; a worker exits here."""
    while message := control.recv(_MAX_BYTES):
        request = json.loads(message)
        answer = {"code": exit_status(request["ended"])} if "ended" in request else _started(control, request["start"])
        control.send(json.dumps(answer).encode())


def _started(control: socket.socket, start: WorkerStart) -> dict[str, int | str]:
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        return {"error": str(error)}
    if pid:
        return {"pid": pid}
    code = 1
    try:
        control.close()
        _become(start, server)
        code = run_worker(start["name"], start["slots"])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        # a worker must not continue with the server's own code
        traceback.print_exc()
    end_process(code)


def _become(start: WorkerStart, server: int) -> None:
    os.setsid()
    die_with_parent(server)
    for number in _IGNORED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if start["log"]:
        log = os.open(start["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    os.environ.update(start["env"])
    settings.cache_clear()
    # with the server's random state, it would draw the same numbers as its predecessor
    np.random.seed()
    show_as([sys.executable, "-m", "workers.queue", "-n", start["name"], "-c", str(start["slots"])])


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore a signal to all processes of a node, which the supervisor handles."""


def main(control_fd: int) -> None:
    """Run the server until its supervisor ends."""
    # else each worker would read the metadata of all distributions, and Celery once more
    installed("farm.handlers")
    by_name()
    for number in _IGNORED:
        signal.signal(number, _ignore)
    show_as([sys.executable, "-m", "workers.queue", "fork-server"])
    with suppress(ConnectionError), socket.socket(fileno=control_fd) as control:
        serve(control)
