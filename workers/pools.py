"""The worker pools of a node: one `celery worker` process for each stage, since the stages need three widths."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import SubprocessError

from farm.child import Child
from farm.queue import queue_name
from farm.rollout import Stage
from farm.settings import Settings
from workers.endings import FINISH, HAND_BACK
from workers.worker import owner_name

log = logging.getLogger(__name__)

_PAUSE_S = (0.2, 30.0)
_SETTLED_S = 20.0
"""A worker that lived so long works; starting one takes a second or two."""
_TOO_MANY = 3
_LOOK_S = 1.0
"""A worker is looked at more often."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The width of each pool, and how many rollouts the node takes in all."""

    init: int
    run: int
    eval: int
    room: int

    def of(self, stage: Stage) -> int:
        return {Stage.INIT: self.init, Stage.RUN: self.run, Stage.EVAL: self.eval}[stage]


class Pool:
    """The worker process of one stage, started again with a growing pause when it dies."""

    def __init__(self, stage: Stage, slots: int, options: Settings, lifeline: int, log_dir: Path | None) -> None:
        self.stage = stage
        self.log = log_dir / f"{stage}.log" if log_dir is not None else None
        self._node = options.node
        self._stall_s = options.stall_s
        self._lifeline = lifeline
        self._argv = [
            *(sys.executable, "-m", "celery", "-A", "workers.app", "worker"),
            *("-n", f"{stage}@{options.node}", "-Q", queue_name(stage, options.node)),
            *("-P", "threads", "-c", str(slots), "-l", "WARNING", "-E", "--without-gossip", "--without-mingle"),
        ]
        self._env = os.environ | {
            "FARM_NODE": options.node,
            "FARM_POOL": str(stage),
            "FARM_LIFELINE_FD": str(lifeline),
            "FARM_STARTED_AT": str(time.time()),
        }
        self._started = 0.0
        self._due = 0.0
        self._finishing = False
        self._n_deaths = 0
        self._frozen_s = self._looked_at = 0.0
        self._child: Child | None = None

    @property
    def owner(self) -> str:
        """The name under which its worker, the last that was started, holds leases."""
        assert self._child is not None
        return owner_name(self._node, str(self.stage), self._child.pid)

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.running

    @property
    def failing(self) -> bool:
        """Whether its workers end again and again, soon after they are started; false once one has lived a while."""
        if self.running and time.monotonic() - self._started > _SETTLED_S:
            self._n_deaths = 0
        return self._n_deaths >= _TOO_MANY

    def start(self) -> None:
        self._child = Child(self._argv, env=self._env, log=self.log, pass_fds=[self._lifeline])
        self._started = time.monotonic()
        self._due = 0.0

    def died(self) -> str:
        """How its worker ended, if that is news; it is due to be started again then."""
        self._end_if_frozen()
        if self._child is None or self._child.running or self._due:
            return ""
        lived_s = time.monotonic() - self._started
        self._n_deaths = 1 if lived_s > _SETTLED_S else self._n_deaths + 1
        pause_s = min(_PAUSE_S[0] * 2 ** min(self._n_deaths, 16), _PAUSE_S[1])
        self._due = time.monotonic() + pause_s
        how = f"{_cause(self._child.process.returncode)} after {lived_s:.1f} s"
        if self._finishing:
            return how
        often = f", {self._n_deaths} times in a row" if self._n_deaths > 1 else ""
        return f"{how}{often}; the next starts in {pause_s:g} s" + (f"; see {self.log}" if self.log else "")

    def _end_if_frozen(self) -> None:
        """One that is stopped, by SIGSTOP say, holds nothing any more; but what its node is given would wait for it."""
        now = time.monotonic()
        # what is looked at seldom is not stopped for long: this process may have been frozen with it
        since_s, self._looked_at = min(now - self._looked_at, _LOOK_S), now
        if self._child is None or not self._child.running or not _is_stopped(self._child.pid):
            self._frozen_s = 0.0
            return
        self._frozen_s += since_s
        if self._frozen_s > self._stall_s:
            log.error("worker %s has been stopped for %g s and is killed", self.owner, self._stall_s)
            self._send(signal.SIGKILL)

    def revive(self) -> None:
        """Start it again once its pause is over, unless it was told to end."""
        if self._due and not self._finishing and time.monotonic() >= self._due:
            try:
                self.start()
            except (OSError, SubprocessError) as error:
                self._due = time.monotonic() + _PAUSE_S[1]
                log.error("no %s worker can be started; it is tried again in %g s: %s", self.stage, _PAUSE_S[1], error)

    def finish(self) -> None:
        """Let its worker begin nothing more, and end with what it plays; it is not started again."""
        self._finishing = True
        self._send(FINISH)

    def hand_back(self) -> None:
        """Let its worker put back into the queue what it plays, and end."""
        self._finishing = True
        self._send(HAND_BACK)

    def _send(self, number: int) -> None:
        if self._child is not None:
            self._child.send(number)

    def end(self, patience_s: float) -> bool:
        """Wait for its worker's end, and kill it after `patience_s`; whether that was not needed."""
        return self._child is None or self._child.end(patience_s)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
