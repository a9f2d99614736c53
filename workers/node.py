"""The supervisor of one node: `python -m workers.node`. Three worker pools, room for sandboxes, drain, clean-up.

The pools are three `celery worker` processes, since a Celery worker has one pool and the stages need three widths. The
supervisor restarts a worker that dies and gives its rollouts back at once; its own death takes everything with it: the
workers by a signal from the kernel, the sandboxes because it held the other end of their lifeline.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import click

from farm.child import Child
from farm.dispatcher import Dispatcher
from farm.errors import FarmError
from farm.plugins import installed
from farm.queue import queue_name
from farm.rollout import Stage
from farm.scratch import locked, own_folder
from farm.settings import Settings, settings
from farm.signals import Signals
from farm.store import engines, migrations, nodes, placement, rollouts
from farm.store.engine import Store
from workers import registry
from workers.sandboxes import layers
from workers.sandboxes.provider import prepare_id
from workers.sandboxes.sweep import sweep, sweep_all, sweep_dead_nodes
from workers.stages import fresh_id, sandbox_id
from workers.worker import owner_name

log = logging.getLogger(__name__)

_SWEEP_S = 5.0
_HEARTBEAT_S = 5.0
_RESTART_S = (0.2, 30.0)
_POLL_S = 0.1


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
    """One `celery worker` process for one stage, started again with a growing pause when it dies."""

    def __init__(self, stage: Stage, slots: int, options: Settings, lifeline: int, log_dir: Path | None) -> None:
        self.stage = stage
        self._node = options.node
        self._log = log_dir / f"{stage}.log" if log_dir is not None else None
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
        self._pause_s = _RESTART_S[0]
        self._started = 0.0
        self._due = 0.0
        self.child: Child | None = None

    @property
    def owner(self) -> str:
        """The name under which the running worker holds leases."""
        assert self.child is not None
        return owner_name(self._node, str(self.stage), self.child.pid)

    def start(self) -> None:
        self.child = Child(self._argv, env=self._env, log=self._log, pass_fds=[self._lifeline])
        self._started = time.monotonic()

    def died(self) -> bool:
        """Whether the worker has ended by itself; it is due to be started again then."""
        if self.child is None or self.child.running:
            return False
        lived_s = time.monotonic() - self._started
        self._pause_s = _RESTART_S[0] if lived_s > 60 else min(self._pause_s * 2, _RESTART_S[1])
        self._due = time.monotonic() + self._pause_s
        return True

    def revive(self) -> None:
        """Start it again once its pause is over."""
        if self.child is None and time.monotonic() >= self._due:
            self.start()


class Supervisor:
    """Runs a node until SIGTERM or SIGINT; then everything it runs is handed back and gone."""

    def __init__(self, options: Settings, slots: Slots, log_dir: Path | None, grace_s: float) -> None:
        self._options = options
        self._lock = locked(options.scratch / "lock", f"node {options.node} runs on this machine already")
        self._slots = slots
        self._grace_s = grace_s
        self._stopping = threading.Event()
        # children first: a process with threads must not fork
        self._lifeline_read, self._lifeline_write = os.pipe()
        self._pools = [Pool(stage, slots.of(stage), options, self._lifeline_read, log_dir) for stage in Stage]
        self._store = Store(options.database_url)
        self._signals = Signals(options.broker_url)
        self._name = f"{options.node}/{os.getpid()}"

    def run(self) -> None:
        """Until stopped. Raises StoreUnavailable if the database is not at this code's schema."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        migrations.check(self._store)
        self._check_sandboxes()
        self._sweep()
        # what was prepared by another version of a handler
        layers.sweep(idle_s=0.0)
        for pool in self._pools:
            pool.start()
        self._announce()
        dispatcher = Dispatcher(self._store, self._signals, self._options, self._name)
        threads = [
            threading.Thread(target=dispatcher.run, name="dispatcher"),
            threading.Thread(target=self._care, name="care"),
        ]
        for thread in threads:
            thread.start()
        try:
            self._watch()
        finally:
            dispatcher.stop()
            for thread in threads:
                thread.join()
            self._end()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping.set()

    def _check_sandboxes(self) -> None:
        kind = self._options.sandbox
        try:
            if kind == "auto":
                kind = registry.best_sandbox()
            missing = registry.sandbox(kind).missing()
        except FarmError as error:
            missing = str(error)
        if missing:
            log.warning("this node can start no sandbox: %s", missing)
        else:
            log.warning("sandboxes of this node: %s", kind)

    def _announce(self) -> None:
        node = nodes.Node(
            node=self._options.node,
            room=self._slots.room,
            init_slots=self._slots.init,
            run_slots=self._slots.run,
            eval_slots=self._slots.eval,
            handlers=sorted(installed(registry.HANDLERS)),
            info={"supervisor": os.getpid(), "host": platform.node(), "python": platform.python_version()},
        )
        self._store.write(lambda connection: nodes.announce(connection, node))
        self._store.write(lambda connection: engines.remove_of(connection, self._options.node))
        if self._options.policy_url:
            own = (self._options.policy_url, self._options.policy_model, self._options.policy_key)
            engine = engines.Engine(*own, added_by=self._options.node)
            self._store.write(lambda connection: engines.add(connection, engine))
        self._signals.wake()

    def _watch(self) -> None:
        """Keep the pools up."""
        while not self._stopping.wait(_POLL_S):
            for pool in self._pools:
                if pool.died():
                    self._give_back(pool)
                pool.revive()

    def _give_back(self, pool: Pool) -> None:
        assert pool.child is not None
        owner = pool.owner
        code = pool.child.process.returncode
        pool.child = None
        try:
            n = self._store.write(lambda connection: rollouts.expire_owner(connection, owner))
        except Exception as error:
            log.error("worker %s ended (%s); its leases will run out by themselves: %s", owner, code, error)
        else:
            log.error("worker %s ended (%s); %d rollouts are given back", owner, code, n)
            self._signals.wake()

    def _care(self) -> None:
        """Heartbeats, and the sandboxes nobody needs any more."""
        swept = time.monotonic()
        while not self._stopping.wait(min(_HEARTBEAT_S, self._options.node_timeout_s / 4)):
            try:
                if not self._store.write(lambda connection: nodes.heartbeat(connection, self._options.node)):
                    self._announce()
                if time.monotonic() - swept > _SWEEP_S:
                    swept = time.monotonic()
                    self._sweep()
            except Exception:
                log.exception("the node's care was interrupted; it will go on")

    def _sweep(self) -> None:
        """Remove the sandboxes of rollouts that are not here any more."""
        gone = sweep(self._wanted_sandboxes)
        if dead := sweep_dead_nodes():
            log.warning("removed what killed nodes left on this machine: %s", ", ".join(dead))
        if gone:
            log.warning("removed %d sandboxes that nobody needs: %s", len(gone), ", ".join(sorted(gone)[:5]))

    def _wanted_sandboxes(self) -> set[str]:
        live = self._store.read(lambda connection: placement.live_sandboxes(connection, self._options.node))
        names = [sandbox_id(rollout_id, attempt) for rollout_id, attempt in live]
        return {*names, *map(fresh_id, names), *map(prepare_id, names)}

    def _end(self) -> None:
        """Drain: nothing new comes, what runs is handed back, and all that is left is ended."""
        log.warning("node %s is ending", self._options.node)
        try:
            self._store.write(lambda connection: nodes.drain(connection, self._options.node))
        except FarmError as error:
            log.error("the node could not be marked as draining: %s", error)
        children = [pool.child for pool in self._pools if pool.child is not None]
        for child in children:
            child.terminate()
        deadline = time.monotonic() + self._grace_s
        for child in children:
            child.end(max(0.1, deadline - time.monotonic()))
        os.close(self._lifeline_write)
        sweep_all()
        try:
            self._store.write(lambda connection: engines.remove_of(connection, self._options.node))
            self._store.write(lambda connection: nodes.remove(connection, self._options.node))
            self._signals.wake()
        except FarmError as error:
            log.error("the node could not be removed from the store: %s", error)
        self._signals.close()
        self._store.close()
        shutil.rmtree(self._options.scratch, ignore_errors=True)
        self._lock.close()


def _own_settings() -> Settings:
    """The settings, with a scratch folder of this node's own: what it sweeps there is never another farm's."""
    shared = settings()
    os.environ["FARM_SCRATCH"] = str(own_folder(shared.scratch, shared.node, shared.database_url))
    settings.cache_clear()
    return settings()


@click.command()
@click.option("--init", "init_slots", default=4, show_default=True, help="Sandboxes started at a time.")
@click.option("--run", "run_slots", default=64, show_default=True, help="Agents that play at a time.")
@click.option("--eval", "eval_slots", default=8, show_default=True, help="Scorings at a time.")
@click.option("--room", default=0, help="Rollouts this node takes in all; default: the sum of the three.")
@click.option("--grace", "grace_s", default=10.0, show_default=True, help="Seconds the workers get to hand back.")
@click.option("--log-dir", type=click.Path(path_type=Path), help="Write the workers' logs there.")
def main(init_slots: int, run_slots: int, eval_slots: int, room: int, grace_s: float, log_dir: Path | None) -> None:
    """Run this machine's part of the farm until SIGTERM."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    slots = Slots(init_slots, run_slots, eval_slots, room or init_slots + run_slots + eval_slots)
    try:
        Supervisor(_own_settings(), slots, log_dir, grace_s).run()
    except FarmError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
