"""The supervisor of one node: `python -m workers.node`. Three worker pools, sandbox slots, drain, clean-up.

It restarts a worker that ends and requeues its rollouts immediately. Its own end stops everything: the workers by a
signal from the kernel, the sandboxes because it held the other end of their lifeline.

On SIGTERM or SIGINT it drains: rollouts that have not started are requeued, started ones continue for a grace period,
and the rest is requeued then. So a time limit or preemption costs no attempt, and nearly finished work is kept.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import select
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO, Any, TypeVar

from sqlalchemy import Connection

from farm.errors import Conflict, FarmError, StoreGone, StoreUnavailable
from farm.launch.slurm_commands import job_left_s
from farm.launch.slurm_pool import SIGNAL_S
from farm.notifications import Signals
from farm.plugins import installed
from farm.records.engine_state import StoredEngine
from farm.records.node import BROKEN, DRAINING, UP, WITHOUT_SANDBOX, Node
from farm.records.rollout import Stage
from farm.scheduler.dispatcher import Dispatcher
from farm.settings import Settings
from farm.store import borrowed_sandboxes, leases, llm_engines, migrations, node_names, nodes, placement
from farm.store.access.sealed_secrets import SecretKey
from farm.store.database import Store, Work
from farm.store.nodes import PROCESS_CONNECTIONS
from workers.config import SandboxConfig
from workers.node.node_cleanup import CancelledSandboxReaper, SandboxSweeper
from workers.node.pools import Slots, WorkerForkServer, WorkerPool
from workers.plugins import registry
from workers.process.supervision import HAND_BACK_S, forget_notes, noted_without_sandbox
from workers.sandboxes.lifecycle import layers
from workers.sandboxes.lifecycle.reaper import sweep_all

log = logging.getLogger("workers.node")

T = TypeVar("T")

_HEARTBEAT_S = 5.0
_POLL_S = 0.1
_PERIOD_S = 0.5
"""Seconds between checks while all workers run, whose ends are noticed immediately, and between reads of the store
while the node drains."""
_WAIT_TIMEOUT_S = 5.0
"""Maximum wait for the database when the node ends or one of its workers has ended."""
_AGAIN_S = 2.0
"""Slurm and srun forward the same signal one after the other: only a later one requests a faster end."""


class JobEnd:
    """The time limit of this process's job, queried once; None outside of a job or without a limit."""

    def __init__(self) -> None:
        self._job_id = os.environ.get("SLURM_JOB_ID", "")
        self._end = math.inf
        if self._job_id:
            try:
                self._end = time.monotonic() + job_left_s(self._job_id)
            except FarmError as error:
                log.warning("End time of job %s is unknown: %s", self._job_id, error)

    def about(self) -> dict[str, Any]:
        """Return what a node announces of its job: its id, and the seconds until its end signal."""
        if not self._job_id:
            return {}
        left_s = self._end - time.monotonic() - SIGNAL_S
        return {"slurm_job": self._job_id} | ({"job_left_s": max(0.0, left_s)} if math.isfinite(left_s) else {})


class Supervisor:
    """Runs a node until SIGTERM or SIGINT, then drains it for up to `grace_s`, and leaves nothing running."""

    def __init__(
        self,
        options: Settings,
        slots: Slots,
        log_dir: Path | None,
        grace_s: float,
        lock: IO[str],
        fork_server: WorkerForkServer,
    ) -> None:
        self._options = options
        self._config = SandboxConfig.of(options)
        self._slots = slots
        self._lock = lock
        self._grace_s = grace_s
        self._shutdown_requested_at = 0.0
        self._hurry = False
        self._stopped = threading.Event()
        self._fork_server = fork_server
        self._pools = {stage: WorkerPool(stage, slots.of(stage), options, fork_server, log_dir) for stage in Stage}
        self._store = Store(
            options.database_url, n_connections=PROCESS_CONNECTIONS, urgent_s=options.node_timeout_s / 4
        )
        self._secret_key = SecretKey.of(options, self._store.engine.url)
        self._signals = Signals(options.broker_url)
        self._dispatcher = Dispatcher(self._store, self._signals, options, f"{options.node}/{os.getpid()}")
        sandboxes = self._config.sandboxes_folder
        self._reaper = CancelledSandboxReaper(self._store, self._signals, options.node, sandboxes, self._stopped)
        self._sweeper = SandboxSweeper(self._store, options.node, self._config, self._stopped)
        self._announced = Node(
            node=options.node,
            room=slots.room,
            init_slots=slots.init,
            run_slots=slots.run,
            eval_slots=slots.eval,
            handlers=sorted(installed(registry.HANDLERS)),
            info={"supervisor": os.getpid(), "lease_s": options.lease_s, **node_names.about(options.home)},
            instance=secrets.token_hex(8),
        )
        self._job = JobEnd()
        self._give_up_at = 0.0
        self._giving_back: dict[str, tuple[str, Future[int]]] = {}
        self._unreachable = False
        self._keyless = ""

    def run(self) -> None:
        """Run until stopped. Raises StoreUnavailable if the database does not have this code's schema."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        migrations.check(self._store)
        self._store.read(self._secret_key.check)
        self._check_sandboxes()
        forget_notes(self._options.scratch)
        self._sweeper.sweep()
        # layers prepared by another version of a handler
        layers.sweep(self._config, idle_s=0.0)
        node_names.take(self._store, self._announced, self._options.node_timeout_s)
        self._requeue_of_predecessor()
        for pool in self._pools.values():
            pool.start()
        threads = [
            threading.Thread(target=self._dispatcher.run, name="dispatcher", daemon=True),
            threading.Thread(target=self._announce_and_care, name="care", daemon=True),
            threading.Thread(target=self._sweeper.run, name="sweep", daemon=True),
            threading.Thread(target=self._reaper.run, name="orphans", daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            with _woken_by_signals() as woken:
                while not self._shutdown_requested_at:
                    self._keep_up()
                    self._wait(woken)
            self._drain()
        finally:
            self._dispatcher.stop()
            self._end_workers()
            self._stopped.set()
            for thread in threads:
                # a thread that waits for an unavailable database is not waited for
                thread.join(0.1 if self._unreachable else _WAIT_TIMEOUT_S)
            self._end()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # only plain values: the interrupted code may hold any lock
        now = time.monotonic()
        self._hurry = self._hurry or (
            bool(self._shutdown_requested_at) and now - self._shutdown_requested_at > _AGAIN_S
        )
        self._shutdown_requested_at = self._shutdown_requested_at or now

    def _check_sandboxes(self) -> None:
        kind = self._options.sandbox
        try:
            provider = registry.chosen_sandbox(kind)
            kind, missing = provider.kind, provider.missing()
        except FarmError as error:
            missing = str(error)
        if missing:
            log.warning("Node can start no sandbox: %s", missing)
        else:
            log.info("Sandboxes of this node: %s", kind)

    def _requeue_of_predecessor(self) -> None:
        """Requeue the work of earlier processes of the node, which have ended: only this one runs for it now."""
        node = self._options.node
        n = self._store.write(lambda connection: placement.requeue_of_predecessor(connection, node))
        restarted = f"its node {node} was killed and started again"
        self._store.write(lambda connection: borrowed_sandboxes.end_on(connection, [node], restarted))
        if n:
            log.warning("Released %d rollouts of a killed process of node %s", n, self._options.node)

    def _announce_and_care(self) -> None:
        """Announce the node once its workers consume from the broker or are known to fail; then send heartbeats."""
        while not all(pool.ready or pool.failing for pool in self._pools.values()):
            if self._stopped.wait(_POLL_S) or self._shutdown_requested_at:
                return
        while True:
            try:
                self._announce()
                break
            except StoreUnavailable as error:
                log.warning("Node not announced; retrying: %s", error)
        ends = self._store.name, self._options.broker_url.split("@")[-1]
        log.info("Node %s is ready: %s; store %s, broker %s", self._options.node, self._slots, *ends)
        self._care()

    def _announce(self) -> None:
        self._announced = replace(self._announced, info=self._announced.info | self._job.about())
        self._store.write(lambda connection: nodes.announce(connection, self._announced))
        url = self._options.policy_url
        self._store.write(lambda connection: llm_engines.remove_of(connection, self._options.node, but=url))
        if url:
            own = (url, self._options.policy_model, self._options.policy_key)
            engine = StoredEngine(*own, added_by=self._options.node)
            self._store.write(lambda connection: llm_engines.add(connection, engine, self._secret_key))
        self._signals.wake()

    def _keep_up(self) -> None:
        for pool in self._pools.values():
            if how := pool.died():
                # logged immediately: its work is requeued when the database answers
                if self._announced.state != DRAINING:
                    log.error("Worker %s exited (%s)", pool.owner, how)
                self._give_back(pool.owner, how)
            pool.revive()
        self._note_given_back()
        if self._announced.state != DRAINING:
            self._check_pools()

    def _wait(self, woken: int) -> None:
        """Wait until a worker ends, a signal comes, or the next check is due."""
        children = [child for pool in self._pools.values() if (child := pool.child) is not None]
        poll = select.poll()
        poll.register(woken, select.POLLIN)
        for child in children:
            poll.register(child, select.POLLIN)
        poll.poll((_PERIOD_S if len(children) == len(self._pools) else _POLL_S) * 1000)

    def _give_back(self, owner: str, how: str) -> None:
        """Let the leases of a worker that has ended expire."""

        def forget(connection: Connection) -> int:
            llm_engines.forget_user(connection, owner)
            return leases.expire_owner(connection, owner)

        self._giving_back[owner] = how, self._store.submit(forget)

    def _note_given_back(self) -> None:
        """Retry if the database was unavailable: for a while after that, leases alone do not show a worker's end."""
        for owner, (how, giving_back) in list(self._giving_back.items()):
            if not giving_back.done():
                continue
            del self._giving_back[owner]
            try:
                n = giving_back.result()
            except StoreUnavailable:
                log.error("Worker %s exited (%s); its rollouts are released when the database answers", owner, how)
                self._give_back(owner, how)
            except Exception:
                log.exception("Worker %s exited (%s); its leases will expire", owner, how)
            else:
                if n:
                    log.error("Released %d rollouts of worker %s, which exited (%s)", n, owner, how)
                if n or self._announced.state != DRAINING:
                    self._signals.wake()

    def _check_pools(self) -> None:
        """Give the node no work while a pool ends repeatedly; rollouts that wait for the pool are soon requeued.

        The same while the node lacks the farm's secret key, whose first secret may be newer than this node.
        """
        failing = [pool.stage for pool in self._pools.values() if pool.failing]
        why = f"its {', '.join(failing)} workers end as soon as they are started" if failing else self._keyless
        if (BROKEN if why else UP) != self._announced.state:
            self._tell_of(why)
        elif failing and time.monotonic() > self._give_up_at:
            self._give_up_at = time.monotonic() + self._options.node_timeout_s
            node = self._options.node

            def leave(connection: Connection) -> int:
                n = placement.requeue_unstarted(connection, node)
                return n + (placement.requeue_of_dead_nodes(connection, [node]) if set(failing) - {Stage.INIT} else 0)

            if n := self._briefly(leave):
                log.error("Released %d rollouts that waited for workers of node %s", n, node)

    def _tell_of(self, why: str) -> None:
        node, info = self._options.node, dict(self._announced.info)
        info.pop(BROKEN, None)
        if why:
            info[BROKEN] = why
            log.error("Node %s gets no more rollouts: %s", node, why)
        else:
            log.error("Node %s gets rollouts again: its workers run", node)
        self._announced = replace(self._announced, state=BROKEN if why else UP, info=info)
        self._give_up_at = time.monotonic() + self._options.node_timeout_s

        def change(connection: Connection) -> None:
            nodes.change(connection, self._announced)
            if why:
                placement.requeue_unstarted(connection, node)

        self._briefly(change)
        self._signals.wake()

    def _briefly(self, work: Work[T]) -> T | None:
        """Return the result of a write; None if the database does not answer soon; it may still succeed later."""
        future = self._store.submit(work)
        try:
            answer = future.result(1.0 if self._unreachable else _WAIT_TIMEOUT_S)
        except Exception as error:
            future.cancel()
            if not self._unreachable:
                log.error("Database does not answer in time: %s", str(error) or "waiting for it")
            self._unreachable = True
            return None
        self._unreachable = False
        return answer

    def _care(self) -> None:
        """Send heartbeats, which must not be delayed by anything else."""

        def beat(connection: Connection) -> str:
            self._keyless = self._secret_key.fault(connection)
            known = {WITHOUT_SANDBOX: noted_without_sandbox(self._options.scratch)}
            return nodes.heartbeat(connection, replace(self._announced, info={**self._announced.info, **known}))

        while not self._stopped.wait(min(_HEARTBEAT_S, self._options.node_timeout_s / 4)):
            try:
                state = self._store.write(beat, urgent=True)
                if not state:
                    self._announce()
                elif state == DRAINING and not self._shutdown_requested_at:
                    log.warning("Drain of node %s was ordered", self._options.node)
                    self._shutdown_requested_at = time.monotonic()
            except (StoreGone, Conflict) as error:
                log.error("Node %s exits: %s", self._options.node, error)
                self._hurry, self._shutdown_requested_at = True, self._shutdown_requested_at or time.monotonic()
                return
            except StoreUnavailable as error:
                log.warning("Heartbeat not written; retrying: %s", error)
            except Exception:
                log.exception("Node maintenance failed; retrying")

    def _drain(self) -> None:
        """Start nothing more, and let running work continue until it has ended or the grace period is over."""
        node = self._options.node
        log.warning("Node %s is draining; running rollouts have %g s", node, self._grace_s)
        self._announced = replace(self._announced, state=DRAINING)
        self._pools[Stage.INIT].finish()

        def leave(connection: Connection) -> int:
            if not node_names.has(connection, self._announced):
                return 0
            nodes.drain(connection, node)
            # the dispatcher may have been about to place some
            placement.requeue_unstarted(connection, node)
            return placement.occupied(connection).get(node, 0)

        look_at = 0.0
        while True:
            if time.monotonic() >= look_at:
                left = self._briefly(leave)
                if look_at == 0.0:
                    self._signals.wake()
                look_at = time.monotonic() + _PERIOD_S
            if left == 0 or self._hurry or time.monotonic() - self._shutdown_requested_at >= self._grace_s:
                break
            self._keep_up()
            time.sleep(_POLL_S)
        log.warning("Node %s is exiting; %s rollouts are still to be released", node, "some" if left is None else left)

    def _end_workers(self) -> None:
        """Let the workers requeue their work; the work of those that could not is requeued for them."""
        for pool in self._pools.values():
            pool.hand_back()
        deadline = time.monotonic() + HAND_BACK_S
        for pool in self._pools.values():
            if not pool.end(max(0.1, deadline - time.monotonic())):
                log.error("Worker %s did not exit within %g s and was killed", pool.owner, HAND_BACK_S)
        self._fork_server.close()

    def _end(self) -> None:
        """Release the node's name and work, and remove its remains on this machine."""
        node = self._options.node
        owners = [pool.owner for pool in self._pools.values()]
        n = self._briefly(lambda connection: node_names.give_back(connection, self._announced, owners))
        if n is None:
            late = "Node %s exits without the database: its rollouts are requeued after %g s or more"
            log.error(late, node, self._options.lease_s)
        elif n:
            log.warning("Released %d rollouts", n)
        self._signals.wake()
        self._fork_server.cut_lifeline()
        sweep_all(self._config)
        self._signals.close()
        if n is not None:
            self._store.close()
        shutil.rmtree(self._options.scratch, ignore_errors=True)
        self._lock.close()


@contextmanager
def _woken_by_signals() -> Iterator[int]:
    """Yield a descriptor that becomes readable at a signal; otherwise a wait continues after the signal's handler."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield read_end
    finally:
        signal.set_wakeup_fd(-1)
        os.close(read_end)
        os.close(write_end)
