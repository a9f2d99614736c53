"""Client of the fork server, `sandboxes/isolation/fork_server.py`: requests monitors, and processes that join a
sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from farm.errors import SandboxError
from workers.sandboxes.isolation.ignored_sigterm import sigterm_blocked
from workers.sandboxes.isolation.parent_death_pipe import continue_at_the_end
from workers.sandboxes.resource_exhaustion import scarcity

_PROJECT = str(Path(__file__).parents[3])
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from workers.sandboxes.isolation.fork_server import main; main()"
_ANSWER_BYTES = 65536
_PAUSE_S = 0.002
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
        while (message := self.take()) is None:
            await _readable(self.fileno())
        return message

    def wait(self, timeout_s: float) -> tuple[dict[str, Any], list[int]] | None:
        """Wait for the next message; None if it does not arrive in time. Blocks."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return self.take() if poll.poll(timeout_s * 1000) else None

    def close(self) -> None:
        self._socket.close()


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _wake, ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class ForkClient:
    """One fork server; started at the first request, and again if it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def request(self, job: dict[str, Any], descriptors: Sequence[int]) -> ForkReplies:
        """Send a request; `descriptors` stay open here. Raises SandboxError if no fork server can be started."""
        with contextlib.ExitStack() as failed, scarcity("ask its porter"):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            failed.enter_context(ours)
            with theirs, os.fdopen(os.memfd_create("job"), "wb") as memory:
                memory.write(json.dumps(job).encode(errors="surrogateescape"))
                memory.flush()
                self._send([memory.fileno(), theirs.fileno(), *descriptors])
            failed.pop_all()
        return ForkReplies(ours)

    def close(self) -> None:
        """End the fork server and wait for its end, so that it does not outlive this process. Sandboxes continue."""
        with self._lock:
            self._end()

    def _send(self, descriptors: list[int]) -> None:
        with self._lock:
            for again in (True, False):
                if self._control is None:
                    self._start()
                try:
                    return self._pass(descriptors)
                except (BrokenPipeError, ConnectionResetError) as error:
                    self._end()
                    if not again:
                        raise SandboxError(
                            f"this worker's fork server exits as soon as it is started: {error}"
                        ) from error

    def _pass(self, descriptors: list[int]) -> None:
        assert self._control
        deadline = time.monotonic() + _CROWDED_S
        while True:
            try:
                socket.send_fds(self._control, [b"job"], descriptors)
                return
            except OSError as error:
                # the user has reached the limit of descriptors in flight
                if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)

    def _start(self) -> None:
        _raise_file_limit()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # if it fails to start, the next message finds the other end closed
        with theirs, sigterm_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, _PROJECT, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            continue_at_the_end(theirs.fileno(), self._process.pid)

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


def _raise_file_limit() -> None:
    """Raise the limit of open files to its maximum, because a user's descriptors in flight count against it, too."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@cache
def fork_client() -> ForkClient:
    """Return this process's fork server. Without `close`, it ends soon after this process, whose socket it watches."""
    return ForkClient()


def close_fork_client() -> None:
    """Close this process's fork server, if there is one."""
    if fork_client.cache_info().currsize:
        fork_client().close()
