"""A farm on a local Ray cluster of two nodes: a killed driver leaves nothing behind, and loses no attempt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import farm
from farm.embedded.child_process import ChildProcess
from farm.launch.shared_address import read_address
from farm.records.node import UP
from farm.records.rollout import State
from farm.store import nodes
from farm.store.database import Store
from tests.acceptance.test_head import env_of, head, leads, log_of, running
from tests.services.farms import farm_folder, left_of, processes_of, until
from workers.testing import plugin_path

SLOTS = ["--init", "2", "--run", "2", "--eval", "2", "--grace", "3"]
LONG_S = 900.0


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Any]:
    """Two Ray nodes of two CPUs on this machine."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2)
    try:
        yield made
    finally:
        made.shutdown()


@pytest.fixture(scope="module")
def client(folder: Path, cluster: Any) -> Iterator[farm.Farm]:
    with head(folder, "first") as first:
        until(lambda: leads(folder, first), lambda: log_of(folder, "first"), LONG_S)
        with farm.connect(folder / "shared") as connected:
            yield connected


def command(folder: Path, cluster: Any, *more: str) -> tuple[list[str], dict[str, str]]:
    words = [sys.executable, "-m", "farm.cli.main", "ray", "up", "--at", str(folder / "shared"), *more]
    path = os.pathsep.join([plugin_path.python_path(plugin_path.PLUGINS), os.environ["PYTHONPATH"]])
    return words, env_of(folder, RAY_ADDRESS=cluster.address, PYTHONPATH=path)


@contextmanager
def up(folder: Path, cluster: Any, name: str, *more: str) -> Iterator[ChildProcess]:
    words, env = command(folder, cluster, *SLOTS, *more)
    with running(ChildProcess(words, env=env, log=folder / f"{name}.log")) as process:
        yield process


def nodes_up(folder: Path) -> set[str]:
    address = read_address(folder / "shared")
    if address is None or not address.head:
        return set()
    store = Store(address.store_url)
    try:
        return {each.node for each in store.read(nodes.listing) if each.state == UP and each.heartbeat_age_s < 20}
    finally:
        store.close()


def logs(folder: Path, name: str) -> str:
    files = [folder / f"{name}.log", *(folder / "shared" / "logs").glob("farm-ray-*.log")]
    return "\n".join(f"== {each.name}\n{each.read_text()[-2000:]}" for each in files if each.exists())


def submitted(client: farm.Farm, n: int, seconds: float) -> str:
    return client.submit({"instances": [{"data_source": "noop", "fields": {"seconds": seconds}}] * n})


def nodes_used(client: farm.Farm, batch_id: str) -> set[str | None]:
    """Return the nodes that ran a batch, none of whose attempts was counted or lost."""
    ended = client.collect(batch_id, timeout_s=LONG_S)
    assert {(each.state, each.n_failures, each.n_lost) for each in ended} == {(State.COMPLETED, 0, 0)}
    assert client.violations(batch_id) == []
    return {each.node for each in ended}


def of_nodes(folder: Path) -> list[str]:
    return [each for each in processes_of(folder) if "ray_watch" in each or " node --at" in each or "workers" in each]


def test_each_ray_node_runs_rollouts_and_releases_them_on_ctrl_c(folder: Path, cluster: Any, client: farm.Farm) -> None:
    with up(folder, cluster, "up") as process:
        until(lambda: len(nodes_up(folder)) == 2, lambda: logs(folder, "up"), LONG_S)
        assert len(nodes_used(client, submitted(client, 12, 0.5))) == 2
        batch_id = submitted(client, 8, 60.0)
        until(lambda: client.status(batch_id).stages[farm.Stage.RUN][State.ACTIVE] == 4, "they run", LONG_S)
        process.send(signal.SIGINT)
        assert process.process.wait(LONG_S) == 0, logs(folder, "up")
    until(lambda: of_nodes(folder) == [], lambda: f"nothing is left: {of_nodes(folder)}")
    assert nodes_up(folder) == set()
    handed_back = client.rollouts(batch_id)
    assert {(each.state, each.n_failures, each.n_lost) for each in handed_back} == {(State.QUEUED, 0, 0)}
    client.cancel(batch_id)


def test_killed_driver_leaves_nothing_behind_and_costs_no_attempt(
    folder: Path, cluster: Any, client: farm.Farm
) -> None:
    with up(folder, cluster, "killed") as process:
        until(lambda: len(nodes_up(folder)) == 2, lambda: logs(folder, "killed"), LONG_S)
        batch_id = submitted(client, 12, 8.0)
        until(lambda: client.status(batch_id).stages[farm.Stage.RUN][State.ACTIVE] == 4, "they run", LONG_S)
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: of_nodes(folder) == [], lambda: f"nothing is left: {of_nodes(folder)}", LONG_S)
    assert nodes_up(folder) == set()
    with up(folder, cluster, "next"):
        assert nodes_used(client, batch_id)


def test_node_of_a_lost_ray_node_restarts_elsewhere(folder: Path, cluster: Any, client: farm.Farm) -> None:
    with up(folder, cluster, "lost"):
        until(lambda: len(nodes_up(folder)) == 2, lambda: logs(folder, "lost"), LONG_S)
        before = nodes_up(folder)
        cluster.remove_node(cluster.list_all_nodes()[-1])
        until(lambda: len(nodes_up(folder)) == 1, "its node has ended", LONG_S)
        cluster.add_node(num_cpus=2)
        until(lambda: len(nodes_up(folder)) == 2, lambda: logs(folder, "lost"), LONG_S)
        assert len(nodes_up(folder) - before) == 1
        assert len(nodes_used(client, submitted(client, 12, 0.5))) == 2


def test_one_of_the_nodes_is_the_head_if_there_is_none(cluster: Any) -> None:
    with farm_folder() as folder:
        with up(folder, cluster, "alone", "--head-on-first"):
            until(lambda: len(nodes_up(folder)) == 2, lambda: logs(folder, "alone"), LONG_S)
            with farm.connect(folder / "shared") as client:
                assert len(nodes_used(client, submitted(client, 12, 0.5))) == 2
        until(lambda: left_of(folder) == [], lambda: f"nothing is left: {left_of(folder)}")


def test_mistakes_are_one_line(folder: Path, cluster: Any, client: farm.Farm) -> None:
    def refused(*more: str, **env: str) -> str:
        words, own = command(folder, cluster, *more)
        done = subprocess.run(words, env=own | env, capture_output=True, text=True, timeout=LONG_S, check=False)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "has 64 CPUs" in refused("--cpus", "64")
    assert f"no head runs in {folder / 'other'}: first run `farm head" in refused("--at", str(folder / "other"))
    assert "no Ray cluster answers at 127.0.0.1:1" in refused("--address", "127.0.0.1:1", RAY_ADDRESS="")
    assert "no Ray cluster answers at nowhere.invalid:6379" in refused(RAY_ADDRESS="nowhere.invalid:6379")
    assert "no Ray cluster answers at http://x" in refused("--address", "http://x")
    assert "pip install 'rollout-farm[ray]'" in refused(PYTHONPATH="")
