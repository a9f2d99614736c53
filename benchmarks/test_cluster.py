"""A simulated cluster runs rollouts with the real store and dispatcher, and its figures add up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.cluster import submit_waiting
from benchmarks.simulation.simulated_cluster import SimulatedCluster
from benchmarks.simulation.simulated_node import SLOTS
from benchmarks.simulation.virtual_time import VirtualTime
from farm.embedded.own_redis import start_redis
from farm.records.rollout import Stage
from testkit.postgres import postgres_database, postgres_server
from workers.testing import plugin_path


def test_events_are_handled_in_their_order() -> None:
    clock, seen = VirtualTime(), list[tuple[float, str]]()
    for instant, name in ((2.0, "b"), (1.0, "a"), (2.0, "c")):
        clock.at(instant, lambda name=name: seen.append((clock(), name)))  # type: ignore[misc]
    while clock.step():
        pass
    assert seen == [(1.0, "a"), (2.0, "b"), (2.0, "c")]


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedCluster]:
    folder = tmp_path_factory.mktemp("r")
    redis, broker_url = start_redis(folder)
    plugin_path.install()
    try:
        with postgres_server() as server_url, postgres_database(server_url) as store_url:
            submit_waiting(store_url, 2 * 76 + 40, 2)
            result = SimulatedCluster(store_url, broker_url, 2, 20.0)
            try:
                yield result
            finally:
                result.close()
    finally:
        redis.terminate()
        redis.end(5.0)


def test_a_full_cluster_stays_full(cluster: SimulatedCluster) -> None:
    cluster.fill()
    cluster.run(3.0, 300.0)
    costs = cluster.meter.costs
    assert 0 < cluster.n_finished <= costs["finish"].n
    assert sum(n for _, n in cluster.rounds) > 0, "what has ended makes room"
    busy_s = sum(node.busy_s for node in cluster.nodes.values())
    assert 0.9 < busy_s / (2 * SLOTS[Stage.RUN] * cluster.time()) <= 1.0
    assert all(cost.of_one_in_database_s > 0 for cost in costs.values())
