"""Faults of the farm's own processes: killed, frozen, drained."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from sqlalchemy import select

from farm.records.rollout import Stage
from farm.scheduler.dispatcher import ROLE
from farm.store import nodes
from farm.store.leader import leaders
from farm.store.sql.clock import age_of
from tests.chaos.client import STREAM, SUBMIT
from tests.chaos.parts import Part
from tests.chaos.processes import running, send
from tests.chaos.strikes import NotNow, Scene, Strike, kind
from workers.sandboxes.lifecycle.state import Process, SandboxRecord

_POLL_S = 0.05
_REFUSED_S = 90.0
"""Most of it is the start of the process, on a busy machine."""
_END_S = 30.0
_HEARD_S = 60.0
"""Longer than any fault disconnects a node from the database."""
_LEADER_S = 11.0
"""A little longer than a leader's lease."""


def _node(scene: Scene) -> Part:
    up = [node for node in scene.parts.nodes if node.running and not node.struck]
    if not up:
        raise NotNow("a node that is up")
    return scene.chance.choice(up)


def _worker(scene: Scene, stage: Stage) -> tuple[Process, str]:
    """Return a worker of a node, and the name under which it holds leases."""
    node = _node(scene)
    result = running(node.pid, f"{stage}@{node.name}")
    if not result:
        raise NotNow(f"a {stage} worker of {node.name}")
    return result[0], f"{node.name}/{stage}/{result[0].pid}"


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
    """Kill the supervisor; everything of the node ends with it."""
    node = _node(scene)
    node.strike(signal.SIGKILL, scene.chance.uniform(0.5, 6.0))
    return Strike(f"{node.name}/{node.pid}", owners=(f"{node.name}/",))


@kind(1)
def drain_node(scene: Scene) -> Strike:
    """Send SIGTERM, as Slurm does; another node of the name follows."""
    node = _node(scene)
    node.strike(signal.SIGTERM, scene.chance.uniform(5.0, 9.0))
    return Strike(f"{node.name}/{node.pid}")


@kind(2)
def freeze_worker(scene: Scene) -> Strike:
    """Freeze a worker beyond its lease; when it thaws, it must not write to rollouts of others."""
    worker, owner = _worker(scene, scene.chance.choice((Stage.RUN, Stage.RUN, Stage.INIT, Stage.EVAL)))
    if not send(worker, signal.SIGSTOP):
        raise NotNow("a worker that lives")
    after_s = scene.parts.size.lease_s * scene.chance.uniform(1.2, 2.0)
    return Strike(owner, owners=(owner,), undo=lambda: _thaw(worker), after_s=after_s)


@kind(1, needs_store=True)
def freeze_leader(scene: Scene) -> Strike:
    """Freeze the supervisor whose dispatcher leads, until another leads."""
    statement = select(leaders.c.owner).where(leaders.c.role == ROLE)
    owner = scene.parts.store.read(lambda connection: connection.execute(statement).scalar_one_or_none())
    leader = next((each for each in scene.parts.nodes if each.running and owner == f"{each.name}/{each.pid}"), None)
    result = running(leader.pid, "workers.node") if leader is not None else []
    if not result or not send(result[0], signal.SIGSTOP):
        raise NotNow("a leader")
    return Strike(str(owner), undo=lambda: _thaw(result[0]), after_s=_LEADER_S + scene.chance.uniform(0.0, 4.0))


@kind(1)
def kill_grader(scene: Scene) -> Strike:
    """Kill a process that scores an answer, or its fork server: the answer is scored again."""
    node = _node(scene)
    graders = running(node.pid, "workers.evaluators")
    if not graders or not send(scene.chance.choice(graders), signal.SIGKILL):
        raise NotNow(f"a grader of {node.name}")
    return Strike(f"of {node.name}")


@kind(2)
def kill_api(scene: Scene) -> Strike:
    up = [api for api in scene.parts.apis if api.running and not api.struck]
    if not up:
        raise NotNow("an API that is up")
    api = scene.chance.choice(up)
    api.strike(signal.SIGKILL, scene.chance.uniform(0.1, 3.0))
    return Strike(f"{api.name}/{api.pid}")


def _has_heartbeats(scene: Scene, node: Part) -> bool:
    """Return whether the database receives a node's heartbeats, by a correct clock: only then is its name taken."""
    line, clock = scene.parts.lines.get(node.name), scene.parts.clock
    if (line is not None and line.silent) or (clock is not None and clock.off_s):
        return False
    if scene.parts.postgres is not None and not scene.parts.postgres.running:
        return False
    statement = select(age_of(nodes.nodes.c.heartbeat_at)).where(nodes.nodes.c.node == node.name)
    age_s = scene.parts.store.read(lambda connection: connection.execute(statement).scalar_one_or_none())
    return age_s is not None and age_s < scene.parts.size.lease_s / 2


@kind(1, needs_store=True)
def second_node(scene: Scene) -> Strike:
    """Start another node with a taken name: it is refused, and the first continues. No other fault is active then."""
    node = _node(scene)
    deadline = time.monotonic() + _HEARD_S
    while not (node.running and not node.struck and _has_heartbeats(scene, node)):
        if time.monotonic() > deadline:
            raise NotNow(f"a {node.name} that the database hears")
        scene.restart_dead()
        time.sleep(_POLL_S)
    other = scene.parts.second(node)
    other.start()
    assert other.child is not None
    deadline = time.monotonic() + _REFUSED_S
    first = node.child
    try:
        while other.running and time.monotonic() < deadline and node.child is first and node.running:
            scene.restart_dead()
            time.sleep(_POLL_S)
        refused, lives = not other.running, node.child is first and node.running
    finally:
        other.child.terminate()
        other.child.end(_END_S)
    if lives and not refused:
        scene.parts.died.append(f"a second {node.name} was not refused within {_REFUSED_S:g} s")
    return Strike(f"{node.name}: {'' if refused else 'not '}refused{'' if lives else ', the first went away'}")


def _thaw(target: Process) -> None:
    send(target, signal.SIGCONT)


def _kill_client(scene: Scene, phase: str) -> Strike:
    deadline = time.monotonic() + _POLL_S
    while time.monotonic() < deadline:
        for client in scene.chance.sample(scene.parts.clients, len(scene.parts.clients)):
            path = scene.parts.order(client.name).phase
            if client.running and not client.struck and path.exists() and path.read_text() == phase:
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
    """Kill the processes that hold a sandbox: its monitor, its first process, or both.

    Its rollout loses its sandbox.
    """
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


def _sandboxes(scene: Scene) -> list[SandboxRecord]:
    """Return the sandboxes of rollouts, which are named by batch, group, sample and attempt."""
    folders = sorted((scene.parts.folder / "scratch").glob("*/sandboxes/b*.*.*.*"))
    result = [SandboxRecord.load(folder) for folder in folders if folder.name.removesuffix(".eval").count(".") == 3]
    return [record for record in result if record is not None and record.first.alive()]


@kind(2)
def kill_fork_server(scene: Scene) -> Strike:
    """Kill the small process that forks sandboxes for a worker; the worker starts another."""
    worker, owner = _worker(scene, scene.chance.choice(list(Stage)))
    porters = running(worker.pid, "fork_server")
    if not porters or not send(porters[0], signal.SIGKILL):
        raise NotNow(f"a porter of {owner}")
    return Strike(f"{owner}: porter {porters[0].pid}")
