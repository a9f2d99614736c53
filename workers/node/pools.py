"""The worker pools of a node: one Celery worker process for each stage, because the stages need different widths."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import SubprocessError

from farm.records.rollout import Stage
from farm.settings import Settings
from workers.node.forked_worker import ForkedProcess, WorkerForkServer
from workers.process.supervision import EXHAUSTED, FINISH, HAND_BACK, owner_name, ready_file

log = logging.getLogger(__name__)

_PAUSE_S = (0.2, 30.0)
_SETTLED_S = 20.0
"""Seconds after which a worker counts as working; its start takes a second or two."""
_SETTLED_AGAIN_S = 120.0
"""The same after a worker that ran out of threads, descriptors or memory, because that recurs slowly."""
_TOO_MANY = 3
_PERIOD_S = 1.0
"""Seconds between checks of a worker."""


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
