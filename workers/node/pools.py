"""The worker pools of a node: one Celery worker process for each stage, because the stages need different widths.

The workers are children of the node's fork server. The first fork server is forked from the supervisor while that has
one thread, so that they share the memory of their common modules and the second of CPU time to import them. A process
with threads must not fork, so a replacement of a server that has ended is started as a program.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

from farm.embedded.child_process import ChildProcess, die_with_parent
from farm.records.rollout import Stage
from farm.settings import Settings
from farm.startup import end_process, frozen_imports
from workers.process.supervision import EXHAUSTED, FINISH, HAND_BACK, WorkerStart, exit_status, owner_name, ready_file

log = logging.getLogger(__name__)

_PAUSE_S = (0.2, 30.0)
_SETTLED_S = 20.0
"""Seconds after which a worker counts as working; its start takes a second or two."""
_SETTLED_AGAIN_S = 120.0
"""The same after a worker that ran out of threads, descriptors or memory, because that recurs slowly."""
_TOO_MANY = 3
_PERIOD_S = 1.0
"""Seconds between checks of a worker."""
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
        ours, theirs = _control_sockets()
        supervisor = os.getpid()
        with theirs:
            pid = os.fork()
            if not pid:
                ours.close()
                for descriptor in (self._lifeline[1], *but):
                    os.close(descriptor)
                _serve_forked(theirs.detach(), self._lifeline[0], supervisor)
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
        ours, theirs = _control_sockets()
        with theirs:
            env = os.environ | {"FARM_LIFELINE_FD": str(self._lifeline[0])}
            argv = [sys.executable, "-m", "workers.queue", str(theirs.fileno()), "-" * _TITLE_ROOM]
            self._child = ChildProcess(argv, env=env, pass_fds=[theirs.fileno(), self._lifeline[0]])
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
        reply: dict[str, Any] = json.loads(answer)
        return reply


def _control_sockets() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(_ANSWER_S)
    return ours, theirs


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


@dataclass(frozen=True, slots=True)
class Slots:
    """The width of each pool, and the maximum number of rollouts of the node."""

    init: int
    run: int
    eval: int
    room: int

    def __str__(self) -> str:
        return f"{self.init} init, {self.run} run, {self.eval} eval, room {self.room}"

    def of(self, stage: Stage) -> int:
        return {Stage.INIT: self.init, Stage.RUN: self.run, Stage.EVAL: self.eval}[stage]


class WorkerPool:
    """The worker process of one stage, restarted with a growing pause when it ends."""

    def __init__(
        self, stage: Stage, slots: int, options: Settings, server: WorkerForkServer, log_dir: Path | None
    ) -> None:
        self.stage = stage
        self.log = log_dir / f"{stage}.log" if log_dir is not None else None
        self._node = options.node
        self._scratch = options.scratch
        self._stall_s = options.stall_s
        self._slots = slots
        self._server = server
        self._env = options.chosen_variables | {
            "FARM_NODE": options.node,
            "FARM_SCRATCH": str(options.scratch),
            "FARM_POOL": str(stage),
            "FARM_STARTED_AT": str(time.time()),
        }
        self._started = 0.0
        self._due = 0.0
        self._finishing = False
        self._n_deaths = 0
        self._settled_s = _SETTLED_S
        self._frozen_s = self._looked_at = 0.0
        self._child: ForkedProcess | None = None

    @property
    def owner(self) -> str:
        """The name under which its last started worker holds leases."""
        assert self._child is not None
        return owner_name(self._node, str(self.stage), self._child.pid)

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.running

    @property
    def child(self) -> ForkedProcess | None:
        """Its worker, while that runs."""
        return self._child if self.running else None

    @property
    def ready(self) -> bool:
        """True if its worker consumes its queue, or has done so."""
        return self._child is not None and ready_file(self._scratch, self._child.pid).exists()

    @property
    def failing(self) -> bool:
        """True if its workers end repeatedly, soon after their start; false once one has run for a while."""
        if self.running and time.monotonic() - self._started > self._settled_s:
            self._n_deaths, self._settled_s = 0, _SETTLED_S
        return self._n_deaths >= _TOO_MANY

    def start(self) -> None:
        self._child = self._server.start(f"{self.stage}@{self._node}", self._slots, self._env, self.log)
        self._started = time.monotonic()
        self._due = 0.0

    def died(self) -> str:
        """Return how its worker ended, and schedule its restart; empty if it runs or that was returned before."""
        self._end_if_frozen()
        if self._child is None or self._child.running or self._due:
            return ""
        ready_file(self._scratch, self._child.pid).unlink(missing_ok=True)
        lived_s = time.monotonic() - self._started
        self._n_deaths = 1 if lived_s > self._settled_s else self._n_deaths + 1
        self._settled_s = _SETTLED_AGAIN_S if self._child.returncode == EXHAUSTED else _SETTLED_S
        pause_s = min(_PAUSE_S[0] * 2 ** min(self._n_deaths, 16), _PAUSE_S[1])
        self._due = time.monotonic() + pause_s
        how = f"{_cause(self._child.returncode)} after {lived_s:.1f} s"
        if self._finishing:
            return how
        often = f", {self._n_deaths} times in a row" if self._n_deaths > 1 else ""
        return f"{how}{often}; the next starts in {pause_s:g} s" + (f"; see {self.log}" if self.log else "")

    def _end_if_frozen(self) -> None:
        """Kill a stopped worker (e.g. by SIGSTOP): its leases have expired, but the node's work would wait for it."""
        now = time.monotonic()
        if now - self._looked_at < _PERIOD_S / 2:
            return
        # a longer gap between checks counts as one interval, because this process may have been suspended, too
        since_s, self._looked_at = min(now - self._looked_at, _PERIOD_S), now
        if self._child is None or not self._child.running or not _is_stopped(self._child.pid):
            self._frozen_s = 0.0
            return
        self._frozen_s += since_s
        if self._frozen_s > self._stall_s:
            log.error("Killing worker %s: it was stopped for %g s", self.owner, self._stall_s)
            self._send(signal.SIGKILL)

    def revive(self) -> None:
        """Restart it once its pause is over, unless it is to end."""
        if self._due and not self._finishing and time.monotonic() >= self._due:
            try:
                self.start()
            except (OSError, SubprocessError) as error:
                self._due = time.monotonic() + _PAUSE_S[1]
                log.error("Start of a %s worker failed; retrying in %g s: %s", self.stage, _PAUSE_S[1], error)

    def finish(self) -> None:
        """Let its worker start nothing more, finish its stages and exit; it is not restarted."""
        self._finishing = True
        self._send(FINISH)

    def hand_back(self) -> None:
        """Let its worker requeue its stages and exit."""
        self._finishing = True
        self._send(HAND_BACK)

    def _send(self, number: int) -> None:
        if self._child is not None:
            self._child.send(number)

    def end(self, patience_s: float) -> bool:
        """Wait for its worker's end, and kill it after `patience_s`. Returns whether that was not necessary."""
        return self._child is None or self._child.end(patience_s)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _cause(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
