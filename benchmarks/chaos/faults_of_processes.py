"""Faults of the farm's own processes: killed, frozen, drained."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from sqlalchemy import select

from benchmarks.chaos.client import STREAM, SUBMIT
from benchmarks.chaos.parts import Part
from benchmarks.chaos.processes import running, send
from benchmarks.chaos.strikes import NotNow, Scene, Strike, kind
from farm.dispatcher import ROLE
from farm.rollout import Stage
from farm.store import nodes
from workers.sandboxes.record import Process, Record

_LOOK_S = 0.05
_LEADER_S = 11.0
"""A little longer than a leader's lease."""


def _node(scene: Scene) -> Part:
    up = [node for node in scene.parts.nodes if node.running and not node.struck]
    if not up:
        raise NotNow("a node that is up")
    return scene.chance.choice(up)


def _worker(scene: Scene, stage: Stage) -> tuple[Process, str]:
    """A worker of a node, and the name that it holds leases under."""
    node = _node(scene)
    found = running(node.pid, f"{stage}@{node.name}")
    if not found:
        raise NotNow(f"a {stage} worker of {node.name}")
    return found[0], f"{node.name}/{stage}/{found[0].pid}"


def _kill_worker(scene: Scene, stage: Stage) -> Strike:
    worker, owner = _worker(scene, stage)
    if not send(worker, signal.SIGKILL):
        raise NotNow("a worker that lives")
    return Strike(owner, owners=(owner,))


@kind(1)
def kill_init_worker(scene: Scene) -> Strike:
    return _kill_worker(scene, Stage.INIT)


@kind(3)
def kill_run_worker(scene: Scene) -> Strike:
    return _kill_worker(scene, Stage.RUN)


@kind(2)
def kill_eval_worker(scene: Scene) -> Strike:
    return _kill_worker(scene, Stage.EVAL)


@kind(2)
def kill_node(scene: Scene) -> Strike:
    """The supervisor; everything of the node goes with it."""
    node = _node(scene)
    node.strike(signal.SIGKILL, scene.chance.uniform(0.5, 6.0))
    return Strike(f"{node.name}/{node.pid}", owners=(f"{node.name}/",))


@kind(1)
def drain_node(scene: Scene) -> Strike:
    """SIGTERM, as Slurm sends it; another node of the name comes afterwards."""
    node = _node(scene)
    node.strike(signal.SIGTERM, scene.chance.uniform(5.0, 9.0))
    return Strike(f"{node.name}/{node.pid}")


@kind(2)
def freeze_worker(scene: Scene) -> Strike:
    """Past its lease; then it thaws, and must not write what is another's by now."""
    worker, owner = _worker(scene, scene.chance.choice((Stage.RUN, Stage.RUN, Stage.INIT, Stage.EVAL)))
    if not send(worker, signal.SIGSTOP):
        raise NotNow("a worker that lives")
    after_s = scene.parts.size.lease_s * scene.chance.uniform(1.2, 2.0)
    return Strike(owner, owners=(owner,), undo=lambda: _thaw(worker), after_s=after_s)


@kind(1, needs_store=True)
def freeze_leader(scene: Scene) -> Strike:
    """The supervisor whose dispatcher leads, until another does."""
    asked = select(nodes.leaders.c.owner).where(nodes.leaders.c.role == ROLE)
    owner = scene.parts.store.read(lambda connection: connection.execute(asked).scalar_one_or_none())
    leader = next((each for each in scene.parts.nodes if each.running and owner == f"{each.name}/{each.pid}"), None)
    found = running(leader.pid, "workers.node") if leader is not None else []
    if not found or not send(found[0], signal.SIGSTOP):
        raise NotNow("a leader")
    return Strike(str(owner), undo=lambda: _thaw(found[0]), after_s=_LEADER_S + scene.chance.uniform(0.0, 4.0))


def _thaw(target: Process) -> None:
    send(target, signal.SIGCONT)


def _kill_client(scene: Scene, phase: str) -> Strike:
    deadline = time.monotonic() + _LOOK_S
    while time.monotonic() < deadline:
        for client in scene.chance.sample(scene.parts.clients, len(scene.parts.clients)):
            told = scene.parts.order(client.name).phase
            if client.running and not client.struck and told.exists() and told.read_text() == phase:
                client.strike(signal.SIGKILL, scene.chance.uniform(0.2, 3.0))
                return Strike(f"{client.name}/{client.pid} in {phase}")
        time.sleep(0.001)
    raise NotNow(f"a client in {phase}")


@kind(1, patience_s=60.0)
def kill_client_in_submit(scene: Scene) -> Strike:
    return _kill_client(scene, SUBMIT)


@kind(2)
def kill_client_in_stream(scene: Scene) -> Strike:
    return _kill_client(scene, STREAM)


@kind(3)
def kill_sandbox(scene: Scene) -> Strike:
    """The processes that hold one: its monitor, its first, or both. What plays in it is lost with it."""
    records = _sandboxes(scene)
    if not records:
        raise NotNow("a sandbox of a rollout")
    record = scene.chance.choice(records)
    chosen: Sequence[Process] = scene.chance.choice(
        ((record.first,), (record.monitor,), (record.monitor, record.first))
    )
    n_killed = sum(send(each, signal.SIGKILL) for each in chosen)
    if not n_killed:
        raise NotNow("a sandbox that lives")
    named, attempt = record.sandbox_id.removesuffix(".eval").rsplit(".", 1)
    return Strike(record.sandbox_id, attempts=((named, int(attempt)),))


def _sandboxes(scene: Scene) -> list[Record]:
    """Those of rollouts, which are named by batch, group, sample and attempt."""
    folders = sorted((scene.parts.folder / "scratch").glob("*/sandboxes/b*.*.*.*"))
    found = [Record.load(folder) for folder in folders if folder.name.removesuffix(".eval").count(".") == 3]
    return [record for record in found if record is not None and record.first.alive()]


@kind(2)
def kill_porter(scene: Scene) -> Strike:
    """The small process that forks sandboxes for a worker; the worker starts another."""
    worker, owner = _worker(scene, scene.chance.choice(list(Stage)))
    porters = running(worker.pid, "porter_server")
    if not porters or not send(porters[0], signal.SIGKILL):
        raise NotNow(f"a porter of {owner}")
    return Strike(f"{owner}: porter {porters[0].pid}")
