"""The fork server of a node's workers: it imports what they all need, once, and forks each of them.

An import takes a second of a processor and a hundred megabytes, and a node has three workers: what is forked shares
both. The supervisor has threads by then and must not fork, so this is a process of its own with a single thread.

A request is a message of JSON on the socket FD, and so is its answer: `{"start": …}` gives `{"pid": …}`, and
`{"ended": PID}` gives `{"code": …}`, null while it runs. The server ends with its supervisor, and its workers with it.
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

from farm.settings import settings
from farm.startup import end_process
from workers.process.supervision import WorkerStart, end_with, exit_status
from workers.queue.worker_process import run_worker
from workers.sandboxes.isolation.linux import show_as

_MAX_BYTES = 1_000_000
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def serve(control: socket.socket) -> None:
    """Answer requests until the supervisor's end is closed; return in the server; a worker ends here."""
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
        # nothing of the server's own code is to go on in a worker
        traceback.print_exc()
    end_process(code)


def _become(start: WorkerStart, server: int) -> None:
    """Take all but memory from the new worker's request: session, signals, environment, log, random numbers, name."""
    os.setsid()
    end_with(server)
    for number in _IGNORED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if start["log"]:
        log = os.open(start["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    os.environ.update(start["env"])
    settings.cache_clear()
    # forked with the server's state, it would draw the numbers that its predecessor drew
    np.random.seed()
    show_as([sys.executable, "-m", "workers.queue", "-n", start["name"], "-c", str(start["slots"])])


def _ignore(number: int, frame: FrameType | None) -> None:
    """A signal to all processes of a node is for its supervisor to obey."""


def main(control_fd: int) -> None:
    """Run the server until its supervisor ends."""
    for number in _IGNORED:
        signal.signal(number, _ignore)
    show_as([sys.executable, "-m", "workers.queue", "fork-server"])
    with suppress(ConnectionError), socket.socket(fileno=control_fd) as control:
        serve(control)
