"""The supervisor of one node: `python -m workers.node`. Three worker pools, room for sandboxes, drain, clean-up.

It starts a worker that dies again and gives its rollouts back at once; its own death takes everything with it: the
workers by a signal from the kernel, the sandboxes because it held the other end of their lifeline.

Told to end, it drains: what has not begun goes back to the queue, what has begun plays on for a grace, and the rest is
handed back then. So a time limit or a preemption costs no attempt, and what was nearly done is not played twice.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TypeVar

import click
from sqlalchemy import Connection

from farm.dispatcher import Dispatcher
from farm.errors import FarmError, StoreUnavailable
from farm.plugins import installed
from farm.rollout import Stage
from farm.scratch import locked, own_folder
from farm.settings import Settings, settings
from farm.signals import Signals
from farm.store import engines, leases, migrations, nodes, placement
from farm.store.engine import Store, Work
from workers import registry
from workers.orphans import Orphans
from workers.pools import Pool, Slots
from workers.sandboxes import layers
from workers.sandboxes.provider import prepare_id
from workers.sandboxes.sweep import sweep, sweep_all, sweep_dead_nodes
from workers.stages import fresh_id, sandbox_id

log = logging.getLogger(__name__)

T = TypeVar("T")

_SWEEP_S = 5.0
_HEARTBEAT_S = 5.0
_POLL_S = 0.1
_LOOK_S = 0.5
_HAND_BACK_S = 10.0
"""What the workers get to put what they play back into the queue. It takes them one or two."""
_PATIENCE_S = 5.0
"""How long a node that ends, or whose worker has ended, waits for the database."""
_AGAIN_S = 2.0
"""Slurm and srun pass on the same signal, one after the other: only a later one asks for haste."""


class Supervisor:
    """Runs a node until SIGTERM or SIGINT, drains it then for up to `grace_s`, and leaves nothing running."""

    def __init__(self, options: Settings, slots: Slots, log_dir: Path | None, grace_s: float) -> None:
        self._options = options
        self._lock = locked(options.scratch / "lock", f"node {options.node} runs on this machine already")
        self._grace_s = grace_s
        self._told_at = 0.0
        self._hurry = False
        self._ending = threading.Event()
        # children first: a process with threads must not fork
        self._lifeline_read, self._lifeline_write = os.pipe()
        self._pools = {stage: Pool(stage, slots.of(stage), options, self._lifeline_read, log_dir) for stage in Stage}
        self._store = Store(options.database_url)
        self._signals = Signals(options.broker_url)
        self._dispatcher = Dispatcher(self._store, self._signals, options, f"{options.node}/{os.getpid()}")
        self._orphans = Orphans(self._store, self._signals, options.node)
        self._announced = nodes.Node(
            node=options.node,
            room=slots.room,
            init_slots=slots.init,
            run_slots=slots.run,
            eval_slots=slots.eval,
            handlers=sorted(installed(registry.HANDLERS)),
            info={"supervisor": os.getpid(), "host": platform.node(), "python": platform.python_version()},
        )
        self._give_up_at = 0.0
        self._giving_back: dict[str, tuple[str, Future[int]]] = {}
        self._unreachable = False

    def run(self) -> None:
        """Until stopped. Raises StoreUnavailable if the database is not at this code's schema."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        migrations.check(self._store)
        self._check_sandboxes()
        self._sweep()
        # what was prepared by another version of a handler
        layers.sweep(idle_s=0.0)
        self._start_anew()
        for pool in self._pools.values():
            pool.start()
        self._announce()
        threads = [
            threading.Thread(target=self._dispatcher.run, name="dispatcher", daemon=True),
            threading.Thread(target=self._care, name="care", daemon=True),
            threading.Thread(target=self._tidy, name="sweep", daemon=True),
            threading.Thread(target=self._orphans.run, name="orphans", daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            while not self._told_at:
                self._keep_up()
                time.sleep(_POLL_S)
            self._drain()
        finally:
            self._dispatcher.stop()
            self._end_workers()
            self._orphans.stop()
            self._ending.set()
            for thread in threads:
                # one that waits for a database which is away is not waited for
                thread.join(0.1 if self._unreachable else _PATIENCE_S)
            self._end()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # only plain values: what has a lock may be locked by the very code that is interrupted here
        now = time.monotonic()
        self._hurry = self._hurry or (bool(self._told_at) and now - self._told_at > _AGAIN_S)
        self._told_at = self._told_at or now

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

    def _start_anew(self) -> None:
        """Nobody but this process plays for the node now, so whoever did before is dead, with its sandboxes."""
        n = self._store.write(lambda connection: placement.start_anew(connection, self._options.node))
        if n:
            log.warning("%d rollouts of a node %s that was killed are given back", n, self._options.node)

    def _announce(self) -> None:
        self._store.write(lambda connection: nodes.announce(connection, self._announced))
        url = self._options.policy_url
        self._store.write(lambda connection: engines.remove_of(connection, self._options.node, but=url))
        if url:
            own = (url, self._options.policy_model, self._options.policy_key)
            engine = engines.Engine(*own, added_by=self._options.node)
            self._store.write(lambda connection: engines.add(connection, engine))
        self._signals.wake()

    def _keep_up(self) -> None:
        """Keep the pools up, and tell the farm if one cannot be."""
        for pool in self._pools.values():
            if how := pool.died():
                self._give_back(pool.owner, how)
            pool.revive()
        self._note_given_back()
        if self._announced.state != nodes.DRAINING:
            self._check_pools()

    def _give_back(self, owner: str, how: str) -> None:
        """Let the leases of a worker that has ended run out."""

        def forget(connection: Connection) -> int:
            engines.forget_user(connection, owner)
            return leases.expire_owner(connection, owner)

        self._giving_back[owner] = how, self._store.submit(forget)

    def _note_given_back(self) -> None:
        """A database that is away is asked again: leases alone are taken for no death for a while after that."""
        for owner, (how, giving_back) in list(self._giving_back.items()):
            if not giving_back.done():
                continue
            del self._giving_back[owner]
            try:
                n = giving_back.result()
            except StoreUnavailable:
                log.error("worker %s ended (%s); what it held is given back when the database answers", owner, how)
                self._give_back(owner, how)
            except Exception:
                log.exception("worker %s ended (%s); its leases will run out by themselves", owner, how)
            else:
                if n or self._announced.state != nodes.DRAINING:
                    log.error("worker %s ended (%s); %d rollouts are given back", owner, how, n)
                    self._signals.wake()

    def _check_pools(self) -> None:
        """While a pool ends again and again, the node is given nothing; what waits for it here does not wait long."""
        failing = [pool.stage for pool in self._pools.values() if pool.failing]
        if (nodes.BROKEN if failing else nodes.UP) != self._announced.state:
            self._tell_of(failing)
        elif failing and time.monotonic() > self._give_up_at:
            self._give_up_at = time.monotonic() + self._options.node_timeout_s
            node = self._options.node

            def leave(connection: Connection) -> int:
                n = placement.hand_back_unbegun(connection, node)
                return n + (placement.abandon(connection, [node]) if set(failing) - {Stage.INIT} else 0)

            if n := self._briefly(leave):
                log.error("%d rollouts that waited for workers of node %s are given back", n, node)

    def _tell_of(self, failing: Sequence[Stage]) -> None:
        node, info = self._options.node, dict(self._announced.info)
        info.pop(nodes.BROKEN, None)
        if failing:
            info[nodes.BROKEN] = f"its {', '.join(failing)} workers end as soon as they are started"
            log.error("node %s is given nothing more: %s", node, info[nodes.BROKEN])
        else:
            log.error("node %s is given rollouts again: its workers live", node)
        self._announced = replace(self._announced, state=nodes.BROKEN if failing else nodes.UP, info=info)
        self._give_up_at = time.monotonic() + self._options.node_timeout_s

        def change(connection: Connection) -> None:
            nodes.change(connection, self._announced)
            if failing:
                placement.hand_back_unbegun(connection, node)

        self._briefly(change)
        self._signals.wake()

    def _briefly(self, work: Work[T]) -> T | None:
        """What a write gives; None if the database does not answer soon. It may be made later all the same."""
        future = self._store.submit(work)
        try:
            answer = future.result(1.0 if self._unreachable else _PATIENCE_S)
        except Exception as error:
            future.cancel()
            if not self._unreachable:
                log.error("the database does not answer in time: %s", str(error) or "it is waited for")
            self._unreachable = True
            return None
        self._unreachable = False
        return answer

    def _care(self) -> None:
        """Heartbeats, which nothing may hold up."""

        def beat(connection: Connection) -> bool:
            lives = nodes.heartbeat(connection, self._options.node)
            if lives:
                # once more: the database may have been away when it changed
                nodes.change(connection, self._announced)
            return lives

        while not self._ending.wait(min(_HEARTBEAT_S, self._options.node_timeout_s / 4)):
            try:
                if not self._store.write(beat):
                    self._announce()
            except StoreUnavailable as error:
                log.warning("this node could not say that it lives; it goes on: %s", error)
            except Exception:
                log.exception("the node's care was interrupted; it will go on")

    def _tidy(self) -> None:
        """The sandboxes nobody needs any more; those that sleep in the kernel are waited for."""
        while not self._ending.wait(_SWEEP_S):
            try:
                self._sweep()
            except StoreUnavailable:
                continue
            except Exception:
                log.exception("the node's sweep was interrupted; the next one comes")

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

    def _drain(self) -> None:
        """Begin nothing more, and let what has begun play on: until it has ended, or the grace has."""
        node = self._options.node
        log.warning("node %s is draining; what it plays may go on for %g s", node, self._grace_s)
        self._announced = replace(self._announced, state=nodes.DRAINING)
        self._pools[Stage.INIT].finish()

        def leave(connection: Connection) -> int:
            nodes.drain(connection, node)
            # the dispatcher may have been about to place some
            placement.hand_back_unbegun(connection, node)
            return placement.occupied(connection).get(node, 0)

        look_at = 0.0
        while True:
            if time.monotonic() >= look_at:
                left = self._briefly(leave)
                if look_at == 0.0:
                    self._signals.wake()
                look_at = time.monotonic() + _LOOK_S
            if left == 0 or self._hurry or time.monotonic() - self._told_at >= self._grace_s:
                break
            self._keep_up()
            time.sleep(_POLL_S)
        log.warning("node %s is ending; %s rollouts are left to be handed back", node, "some" if left is None else left)

    def _end_workers(self) -> None:
        """They hand back what they play; what those held that could not is handed back for them."""
        for pool in self._pools.values():
            pool.hand_back()
        deadline = time.monotonic() + _HAND_BACK_S
        for pool in self._pools.values():
            if not pool.end(max(0.1, deadline - time.monotonic())):
                log.error("worker %s did not end within %g s and was killed", pool.owner, _HAND_BACK_S)

    def _end(self) -> None:
        """Take the node's name off everything, and remove what is left on this machine."""
        node = self._options.node

        def leave(connection: Connection) -> int:
            n = placement.hand_back_all(connection, node)
            for pool in self._pools.values():
                engines.forget_user(connection, pool.owner)
            engines.remove_of(connection, node)
            nodes.remove(connection, node)
            return n

        n = self._briefly(leave)
        if n is None:
            lease_s = self._options.lease_s
            log.error(
                "node %s ends without the database: what it had is played elsewhere in %g s or more", node, lease_s
            )
        elif n:
            log.warning("%d rollouts are handed back", n)
        self._signals.wake()
        os.close(self._lifeline_write)
        sweep_all()
        self._signals.close()
        if n is not None:
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
@click.option(
    "--grace",
    "grace_s",
    default=15.0,
    show_default=True,
    help=f"Seconds that what has begun may play on after SIGTERM. Up to {_HAND_BACK_S:g} more go into handing back the "
    "rest: stay that far, and a few for the clean-up, below what kills the node: Slurm's KillWait is 30 s.",
)
@click.option("--log-dir", type=click.Path(path_type=Path), help="Write the workers' logs there.")
def main(init_slots: int, run_slots: int, eval_slots: int, room: int, grace_s: float, log_dir: Path | None) -> None:
    """Run this machine's part of the farm until SIGTERM; a second one, seconds later, ends the grace."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    slots = Slots(init_slots, run_slots, eval_slots, room or init_slots + run_slots + eval_slots)
    try:
        Supervisor(_own_settings(), slots, log_dir, grace_s).run()
    except FarmError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
