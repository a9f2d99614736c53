"""The worker processes of a node, as its supervisor starts and sees them: children of the node's fork server."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farm.embedded.child_process import ChildProcess
from workers.process.supervision import WorkerStart
from workers.queue.process_title import TITLE_ROOM

_POLL_S = 0.02
_KILL_S = 5.0
_ANSWER_S = 120.0
"""Seconds in which the server answers; the first answer waits for its imports, on however busy a machine."""
_MAX_BYTES = 65536


class WorkerForkServer:
    """The fork server of a node, started with its first worker, and anew if it has ended: its workers end with it."""

    def __init__(self, lifeline: int) -> None:
        self._lifeline = lifeline
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None
        self._control: socket.socket | None = None

    def start(self, name: str, slots: int, env: Mapping[str, str], log: Path | None) -> ForkedWorker:
        """Fork a worker. Raises OSError if that fails."""
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        start = WorkerStart(name=name, slots=slots, env=dict(env), log=str(log or ""))
        with self._lock:
            if self._child is None or not self._child.running:
                self._begin()
            answer = self._ask({"start": start})
        if "pid" not in answer:
            raise OSError(f"the node cannot start a process: {answer.get('error')}")
        try:
            return ForkedWorker(self, answer["pid"])
        except OSError:
            os.killpg(answer["pid"], signal.SIGKILL)
            raise

    def code(self, pid: int) -> int | None:
        """Return the exit status of a worker that has ended; that of SIGKILL if it ended with its server."""
        with self._lock:
            try:
                code: int | None = self._ask({"ended": pid})["code"]
            except OSError:
                return -signal.SIGKILL
        return code

    def close(self) -> None:
        """End the server, and any worker that is left."""
        with self._lock:
            if self._control is not None:
                self._control.close()
            if self._child is not None:
                self._child.end(_KILL_S)

    def _begin(self) -> None:
        if self._control is not None:
            self._control.close()
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            env = os.environ | {"FARM_LIFELINE_FD": str(self._lifeline)}
            argv = [sys.executable, "-m", "workers.queue", str(its.fileno()), "-" * TITLE_ROOM]
            self._child = ChildProcess(argv, env=env, pass_fds=[its.fileno(), self._lifeline])
        ours.settimeout(_ANSWER_S)
        self._control = ours

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's answer. Raises OSError if there is none, once the server and its workers are dead."""
        assert self._child is not None
        assert self._control is not None
        try:
            self._control.send(json.dumps(request).encode())
            answer = self._control.recv(_MAX_BYTES)
        except OSError:
            self._child.end(0.0)
            raise
        if not answer:
            raise ConnectionError("the fork server of the workers has ended")
        result: dict[str, Any] = json.loads(answer)
        return result


class ForkedWorker:
    """A worker process, with the methods of `ChildProcess`."""

    def __init__(self, server: WorkerForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._lock = threading.Lock()
        # much cheaper to ask than /proc/PID/stat, ten times a second
        self._pidfd = os.pidfd_open(pid)
        self._ended = select.poll()
        self._ended.register(self._pidfd, select.POLLIN)

    @property
    def running(self) -> bool:
        # the server is asked only at the end: a pid stays this worker's until the server has seen that
        with self._lock:
            if self.returncode is None and self._ended.poll(0):
                self.returncode = self._server.code(self.pid)
                if self.returncode is not None:
                    os.close(self._pidfd)
            return self.returncode is None

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, grace_s: float) -> bool:
        """Wait for it to end, and kill its whole session if it has not after `grace_s`; whether it ended by itself."""
        if self._ends_within(grace_s):
            return True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # a process that hangs in the kernel ends when that returns; it is not waited for
        self._ends_within(_KILL_S)
        return False

    def _ends_within(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while self.running:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True
