"""Servers that fork a process for each request, and the requests to them. Standard library only.

A request is one message on a socket with descriptors: a memory file with the job as JSON, then those of the job. A
server ends when its client closes the socket.

Slurm and systemd send SIGTERM to every process of a job. It could hit a server before that ignores it. So the client
blocks SIGTERM while it starts the server, which inherits that across exec. The server then ignores the signal, which
also drops a pending one, and unblocks it for its own children.
"""

from __future__ import annotations

import json
import os
import signal
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

_MAX_DESCRIPTORS = 16


def program_of(module: str) -> str:
    """Return the code for `python -I -S -c` that runs the `main` of a module below the folder in its first argument."""
    return f"import sys; sys.path.append(sys.argv[1]); from {module} import main; main()"


def ignore_sigterm() -> None:
    """Ignore SIGTERM and unblock it. A server calls this first."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def send(control: socket.socket, job: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Send a request; `descriptors` stay open here. Raises OSError."""
    memory = os.memfd_create("job")
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(json.dumps(job).encode(errors="surrogateescape"))
        socket.send_fds(control, [b"job"], [memory, *descriptors])
    finally:
        os.close(memory)


def job_in(request: int) -> dict[str, Any]:
    """Return the job in the first descriptor of a request, and close it."""
    job: dict[str, Any] = json.loads(os.pread(request, os.fstat(request).st_size, 0))
    os.close(request)
    return job


def serve(control: socket.socket, fork: Callable[[list[int]], int], work: Callable[[list[int]], object]) -> None:
    """Run `work`, which does not return, in a fork for each request, until the client closes its end."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 16, _MAX_DESCRIPTORS)
        if not message:
            return
        if fork(descriptors) == 0:
            control.close()
            work(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
