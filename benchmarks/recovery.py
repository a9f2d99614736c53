"""Recovery time of a rollout when a part of the farm fails: from the signal to the start of its next stage.

Nodes as `farm node` runs them, on one Postgres and one Redis, with all defaults (`--quick`: leases and heartbeats of
6 s instead of 60). The failures: a run worker killed by -9; a node ended by SIGTERM without grace; Redis killed by -9
and restarted at once, empty; a node killed by -9 and restarted at once as by a service manager; a node killed by -9 for
good, and a run worker stopped by SIGSTOP, both of which are only detected when their leases expire. Their leases were
just renewed, so this is the longest possible time.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import farm
from farm.embedded.child_process import ChildProcess
from farm.embedded.own_redis import start_redis
from farm.settings import Settings
from farm.store import migrations
from farm.store.database import Store
from testkit.postgres import postgres_server
from testkit.processes import named, tree
from testkit.report import Report, options
from workers.testing import plugin_path

N_LONG = 36
_DEADLINE_S = 180.0
_SHORT = {"FARM_LEASE_S": "6", "FARM_NODE_TIMEOUT_S": "6", "FARM_STALL_S": "6"}


@dataclass(slots=True)
class Machines:
    """Nodes of one farm on this machine, each as if on a machine of its own."""

    folder: Path
    store_url: str
    broker_url: str
    env: dict[str, str]
    nodes: dict[str, ChildProcess] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start or restart a node; it may not be ready yet."""
        env = os.environ | self.env | {"FARM_NODE": name, "FARM_SANDBOX": "namespace"}
        env |= {"FARM_STORE_URL": self.store_url, "FARM_BROKER_URL": self.broker_url}
        env |= {"FARM_HOME": str(self.folder / "home"), "FARM_SCRATCH": str(self.folder / "scratch")}
        command = [sys.executable, "-m", "workers.node", "--init", "8", "--run", "64", "--eval", "8", "--grace", "0"]
        log = self.folder / f"{name}.log"
        self.nodes[name] = ChildProcess(command, env=env, log=log, on_parent_death=signal.SIGTERM)

    def run_worker(self, name: str) -> int:
        return named(tree(self.nodes[name].pid), "-n run@")

    def end(self) -> None:
        for node in self.nodes.values():
            node.terminate()
        for node in self.nodes.values():
            node.end(30.0)


def main() -> None:
    result = options(__doc__)
    plugin_path.install()
    rounds = 1 if result.quick else 3
    env = _SHORT if result.quick else {}
    lease_s = float(env.get("FARM_LEASE_S", Settings.model_fields["lease_s"].default))
    report = Report(
        "from the death of a part to its rollouts running again" + (", with short leases" if result.quick else "")
    )
    with tempfile.TemporaryDirectory(prefix="farm-recovery-", dir="/tmp") as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        url = stack.enter_context(postgres_server())
        store = Store(url)
        migrations.migrate(store)
        store.close()
        redis = Redis(folder)
        stack.callback(redis.end)
        machines = Machines(folder, url, redis.url, dict(env))
        stack.callback(machines.end)
        client = stack.enter_context(farm.connect(url, broker_url=redis.url))
        for node in ("one", "two", "three"):
            machines.start(node)
        killed = [wait for _ in range(rounds) for wait in killed_worker(client, machines)]
        report.times("run_worker_killed", killed)
        drained = [wait for _ in range(rounds) for wait in drained_node(client, machines)]
        report.times("node_drained_without_grace", drained)
        stalled = [wait for _ in range(rounds) for wait in killed_redis(client, redis)]
        report.times("redis_killed_and_restarted", stalled)
        restarted = [wait for _ in range(rounds) for wait in restarted_node(client, machines)]
        report.times("node_killed_and_restarted", restarted)
        on_node, frozen = held_by_leases(client, machines)
        report.times("node_killed", on_node, lease_ms=lease_s * 1000)
        report.times("run_worker_frozen", frozen, lease_ms=lease_s * 1000)
    report.show(result.json)


class Redis:
    """A private Redis that can be killed and restarted at its address, without its data."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._child, self.url = start_redis(folder / "redis", folder / "redis.log")

    def die_and_return(self) -> None:
        self._child.process.kill()
        self._child.process.wait()
        self._child, _ = start_redis(self._folder / "redis", self._folder / "redis.log")

    def end(self) -> None:
        self._child.terminate()
        self._child.end(5.0)


def killed_worker(client: farm.Farm, machines: Machines) -> list[float]:
    with _long_ones(client, ("one", "two", "three")) as batch_id:
        held = _held_by(client, batch_id, "one")
        os.kill(machines.run_worker("one"), signal.SIGKILL)
        return _waits(client, held, time.time())


def drained_node(client: farm.Farm, machines: Machines) -> list[float]:
    with _long_ones(client, ("one", "two", "three")) as batch_id:
        held = _held_by(client, batch_id, "one")
        machines.nodes["one"].terminate()
        waits = _waits(client, held, time.time())
    machines.nodes["one"].end(30.0)
    machines.start("one")
    return waits


def restarted_node(client: farm.Farm, machines: Machines) -> list[float]:
    """Measure a restart by a service manager: the new node knows at once that the old one's work is lost."""
    with _long_ones(client, ("one", "two", "three")) as batch_id:
        held = _held_by(client, batch_id, "one")
        at = time.time()
        machines.nodes["one"].process.kill()
        machines.nodes["one"].process.wait()
        machines.start("one")
        return _waits(client, held, at)


def killed_redis(client: farm.Farm, redis: Redis) -> list[float]:
    """Measure short rollouts, most of which wait for a message when Redis loses it."""
    batch_id = client.submit({"instances": [{"data_source": "noop", "fields": {"seconds": 0.2}}] * 400})
    _until(lambda: client.status(batch_id).n_finished >= 50)
    held = [each.rollout_id for each in client.rollouts(batch_id) if each.node is not None and each.finished_at is None]
    killed_at = time.time()
    redis.die_and_return()
    client.wait(batch_id, _DEADLINE_S)
    begun = [[timing.started_at or 0.0 for timing in client.timings(rollout_id)] for rollout_id in held]
    return [min(after) - killed_at for each in begun if (after := [at for at in each if at > killed_at])]


def held_by_leases(client: farm.Farm, machines: Machines) -> tuple[list[float], list[float]]:
    """Measure a killed node and a frozen worker of another at the same time, as each takes a whole lease."""
    with _long_ones(client, ("one", "two", "three")) as batch_id:
        on_node, by_frozen = _held_by(client, batch_id, "one"), _held_by(client, batch_id, "two")
        frozen = machines.run_worker("two")
        at = time.time()
        machines.nodes["one"].process.kill()
        os.kill(frozen, signal.SIGSTOP)
        try:
            return _waits(client, on_node, at), _waits(client, by_frozen, at)
        finally:
            # unless its node has noticed it and killed it
            with suppress(ProcessLookupError):
                os.kill(frozen, signal.SIGCONT)


@contextmanager
def _long_ones(client: farm.Farm, nodes: Collection[str]) -> Iterator[str]:
    """Submit a batch whose agents all run, some on each of the nodes."""
    instance = {"data_source": "noop", "fields": {"seconds": 3600.0}}
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        batch_id = client.submit({"instances": [instance] * N_LONG, "max_attempts": 100, "limits": {"run_s": 7200}})
        try:
            _until(partial(_all_active, client, batch_id))
            # a node that was not ready yet has none
            if {each.node for each in client.rollouts(batch_id)} == set(nodes):
                yield batch_id
                return
        finally:
            client.cancel(batch_id)
        time.sleep(1.0)
    raise TimeoutError(f"{', '.join(nodes)} do not all run rollouts")


def _all_active(client: farm.Farm, batch_id: str) -> bool:
    return client.status(batch_id).stages[farm.Stage.RUN][farm.State.ACTIVE] == N_LONG


def _held_by(client: farm.Farm, batch_id: str, node: str) -> list[str]:
    return [each.rollout_id for each in client.rollouts(batch_id) if each.node == node]


def _waits(client: farm.Farm, rollout_ids: Collection[str], since: float) -> list[float]:
    """Return the seconds from `since` until an agent ran each of these again, once all do."""
    result: dict[str, float] = {}

    def all_found() -> bool:
        for rollout_id in rollout_ids:
            for each in client.timings(rollout_id) if rollout_id not in result else ():
                if each.stage is farm.Stage.RUN and each.attempt > 1 and each.started_at is not None:
                    result.setdefault(rollout_id, each.started_at - since)
        return len(result) == len(rollout_ids)

    _until(all_found)
    return list(result.values())


def _until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError("the farm does not do what is expected")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
