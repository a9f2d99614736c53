"""Client of the fork server, `sandboxes/isolation/fork_server.py`: requests monitors, and processes that join a
sandbox.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from farm.errors import SandboxError
from workers.sandboxes.isolation.fork_requests import program_of, send
from workers.sandboxes.isolation.parent_death_pipe import continue_at_the_end
from workers.sandboxes.resource_exhaustion import scarcity

_PROJECT = str(Path(__file__).parents[3])
_ANSWER_BYTES = 65536
_POLL_S = 0.002
_CROWDED_S = 1.0
"""Maximum wait for free descriptors in flight. The event loop is blocked meanwhile, and a sandbox can hold them."""


class ForkReplies:
    """The socket with the replies to one request: a few messages, some with a descriptor, then end of file."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def take(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its descriptors; None if none has arrived. An empty message is the end."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _ANSWER_BYTES, 1)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return {}, []
        return (json.loads(data) if data else {}), descriptors

    async def next(self) -> tuple[dict[str, Any], list[int]]:
        """Wait for the next message on the event loop."""
        loop, descriptor = asyncio.get_running_loop(), self.fileno()
        while (message := self.take()) is None:
            ready = asyncio.Event()
            loop.add_reader(descriptor, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(descriptor)
        return message

    def wait(self, timeout_s: float) -> tuple[dict[str, Any], list[int]] | None:
        """Wait for the next message; None if it does not arrive in time. Blocks."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return self.take() if poll.poll(timeout_s * 1000) else None

    def close(self) -> None:
        self._socket.close()


class ForkServerProcess:
    """A server of `fork_requests.py`. It ends soon after this process, whose socket it watches."""

    def __init__(self, module: str, path: str, stdin: int, stderr: IO[bytes] | None = None) -> None:
        """Start the `main` of a module, whose last argument is the number of its socket; `path` is its PATH."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, "-I", "-S", "-c", program_of(module), _PROJECT, str(theirs.fileno())]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        # if it fails to start, the next message finds the other end closed
        with theirs:
            try:
                self.process = subprocess.Popen(
                    argv,
                    stdin=stdin,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    env={"PATH": path, "LANG": "C.UTF-8"},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            continue_at_the_end(theirs.fileno(), self.process.pid)

    def close(self) -> None:
        """End it, and wait for its end."""
        self.control.close()
        self.process.kill()
        self.process.wait()


class ForkClient:
    """One fork server; started at the first request, and again if it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ForkServerProcess | None = None

    def request(self, job: dict[str, Any], descriptors: Sequence[int]) -> ForkReplies:
        """Send a request; `descriptors` stay open here. Raises SandboxError if no fork server can be started."""
        with scarcity("ask its porter"):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with theirs:
                    self._send(job, [theirs.fileno(), *descriptors])
            except BaseException:
                ours.close()
                raise
        return ForkReplies(ours)

    def close(self) -> None:
        """End the fork server and wait for its end, so that it does not outlive this process. Sandboxes continue."""
        with self._lock:
            self._end()

    def _send(self, job: dict[str, Any], descriptors: list[int]) -> None:
        with self._lock:
            for again in (True, False):
                if self._server is None:
                    # to its maximum, because a user's descriptors in flight count against it, too
                    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
                    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
                    path = os.environ.get("PATH", os.defpath)
                    module = "workers.sandboxes.isolation.fork_server"
                    self._server = ForkServerProcess(module, path, subprocess.DEVNULL)
                try:
                    return _pass(self._server.control, job, descriptors)
                except (BrokenPipeError, ConnectionResetError) as error:
                    self._end()
                    if not again:
                        raise SandboxError(
                            f"this worker's fork server exits as soon as it is started: {error}"
                        ) from error

    def _end(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def _pass(control: socket.socket, job: dict[str, Any], descriptors: list[int]) -> None:
    deadline = time.monotonic() + _CROWDED_S
    while True:
        try:
            return send(control, job, descriptors)
        except OSError as error:
            # the user has reached the limit of descriptors in flight
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


@cache
def fork_client() -> ForkClient:
    """Return this process's fork server. Without `close`, it ends soon after this process, whose socket it watches."""
    return ForkClient()


def close_fork_client() -> None:
    """Close this process's fork server, if there is one."""
    if fork_client.cache_info().currsize:
        fork_client().close()
