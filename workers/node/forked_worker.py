"""The worker processes of a node, as seen by its supervisor: children of the node's fork server.

The first fork server is forked from the supervisor while that has one thread, so that they share the memory of their
common modules and the second of CPU time to import them. A process with threads must not fork, so a replacement of a
server that has ended is started as a program.
"""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from farm.embedded.child_process import ChildProcess, die_with_parent
from farm.startup import end_process, frozen_imports
from workers.process.supervision import WorkerStart, exit_status

_POLL_S = 0.02
_KILL_S = 5.0
_ANSWER_S = 120.0
"""Time limit of an answer; the first answer waits for the server's imports, possibly on a busy machine."""
_TITLE_ROOM = 256
"""Extra bytes for a worker's command line, which replaces the server's own."""
_MAX_BYTES = 65536


class WorkerForkServer:
    """The fork server of a node, started by `fork` or with the first worker, and again if it has ended.

    Its workers end with it. `lifeline` is a pipe (read end, write end); the workers inherit the read end.
    """

    def __init__(self, lifeline: tuple[int, int]) -> None:
        self._lifeline = lifeline
        self._lock = threading.Lock()
        self._child: ChildProcess | ForkedProcess | None = None
        self._control: socket.socket | None = None

    def fork(self, but: Sequence[int] = ()) -> None:
        """Fork the server from this process, which must have one thread, and no open files but standard ones and `but`.

        The server closes `but`. The call returns only in this process. Raises OSError if it fails.
        """
        ours, its = _control_sockets()
        supervisor = os.getpid()
        with its:
            pid = os.fork()
            if not pid:
                ours.close()
                for descriptor in (self._lifeline[1], *but):
                    os.close(descriptor)
                _serve_forked(its.detach(), self._lifeline[0], supervisor)
        self._child, self._control = ForkedProcess(exit_status, pid), ours

    def start(self, name: str, slots: int, env: Mapping[str, str], log: Path | None) -> ForkedProcess:
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
            return ForkedProcess(self.code, answer["pid"])
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
        """End the server and the remaining workers."""
        with self._lock:
            if self._control is not None:
                self._control.close()
            if self._child is not None:
                self._child.end(_KILL_S)

    def cut_lifeline(self) -> None:
        """Close the end of the lifeline that only this process holds, which ends the sandboxes."""
        os.close(self._lifeline[1])

    def _begin(self) -> None:
        if self._control is not None:
            self._control.close()
        ours, its = _control_sockets()
        with its:
            env = os.environ | {"FARM_LIFELINE_FD": str(self._lifeline[0])}
            argv = [sys.executable, "-m", "workers.queue", str(its.fileno()), "-" * _TITLE_ROOM]
            self._child = ChildProcess(argv, env=env, pass_fds=[its.fileno(), self._lifeline[0]])
        self._control = ours

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's answer. Raises OSError if there is none; the server and its workers are dead by then."""
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


def _control_sockets() -> tuple[socket.socket, socket.socket]:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(_ANSWER_S)
    return ours, its


def _serve_forked(control: int, lifeline: int, supervisor: int) -> None:
    os.setsid()
    die_with_parent(supervisor)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.set_inheritable(lifeline, True)
    os.environ["FARM_LIFELINE_FD"] = str(lifeline)
    with frozen_imports():
        from workers.queue.worker_fork_server import main
    main(control)
    end_process(0)


class ForkedProcess:
    """A process without a `Popen`, with the methods of `ChildProcess`; `code` gives its exit status after its end."""

    def __init__(self, code: Callable[[int], int | None], pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._code = code
        self._lock = threading.Lock()
        # much cheaper than /proc/PID/stat, ten times a second
        self._pidfd = os.pidfd_open(pid)
        self._ended = select.poll()
        self._ended.register(self._pidfd, select.POLLIN)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable at its end; call it while it is `running`."""
        return self._pidfd

    @property
    def running(self) -> bool:
        # called only at the end: the pid is not reused until the parent has collected the status
        with self._lock:
            if self.returncode is None and self._ended.poll(0):
                self.returncode = self._code(self.pid)
                if self.returncode is not None:
                    os.close(self._pidfd)
            return self.returncode is None

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, grace_s: float) -> bool:
        """Wait for its end, and kill its session after `grace_s`. Returns whether it ended by itself."""
        if self._ends_within(grace_s):
            return True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # a process in an uninterruptible sleep is not waited for; it ends when it wakes
        self._ends_within(_KILL_S)
        return False

    def _ends_within(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while self.running:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True
