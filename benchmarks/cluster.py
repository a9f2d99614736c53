"""One to a thousand nodes: utilization of run slots, and the cost for the database and the dispatcher.

The store, the dispatcher and the messages are real; nodes are simulated (`benchmarks.simulation`) in virtual time, with
64 run slots each and always more rollouts waiting than slots. Efficiency is the utilization of slot time, limited by
what a database of 16 cores can process: that is extrapolated from its CPU time, not measured on a cluster.
`--real N` instead runs N real nodes on this machine, compared with one, with rollouts that wait as for a slow policy.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import farm
from benchmarks.real_nodes import compare_real_nodes
from benchmarks.simulation.cost_meter import Cost
from benchmarks.simulation.simulated_cluster import SimulatedCluster
from benchmarks.simulation.simulated_node import PERIODIC, ROOM, SLOTS
from farm.embedded.own_redis import start_redis
from farm.records.rollout import Stage
from farm.store import migrations
from farm.store.database import Store
from testkit.postgres import postgres_database, postgres_server
from testkit.report import Report
from workers.testing import plugin_path

CORES = 16
"""Cores of the database for which the efficiency is stated."""
_OF_LIFE = {"claim": 3, "advance": 2, "finish": 1}
"""Transitions of one rollout."""
_N_SAMPLES = 8
_AIM = {64: 99.0, 1000: 95.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=_numbers, default=[1, 4, 16, 64, 256, 1000], metavar="N,N,…")
    parser.add_argument("--rollout-s", type=float, default=60.0, help="mean seconds of a run stage")
    parser.add_argument("--queued", type=int, default=50_000, help="rollouts that wait beyond the room of the nodes")
    parser.add_argument("--batches", type=int, default=4, help="batches that they are of")
    parser.add_argument("--virtual-s", type=float, default=30.0, help="simulated seconds; what is queued lasts for 11")
    parser.add_argument("--wall-s", type=float, default=600.0, help="seconds after which a simulation ends in any case")
    parser.add_argument("--real", type=int, metavar="N", help="run on N real nodes, and on one, instead")
    parser.add_argument("--quick", action="store_true", help="1, 16 and 64 nodes, fewer rollouts, within 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    result = parser.parse_args()
    plugin_path.install()
    report = Report("efficiency of a cluster")
    with tempfile.TemporaryDirectory(prefix="farm-cluster-") as name, ExitStack() as stack:
        folder = Path(name)
        server_url = stack.enter_context(postgres_server())
        redis, broker_url = start_redis(folder / "redis", folder / "redis.log")
        stack.callback(redis.end, 5.0)
        stack.callback(redis.terminate)
        if result.real:
            store_url = stack.enter_context(postgres_database(server_url))
            compare_real_nodes(report, folder, store_url, broker_url, result.real)
        else:
            if result.quick:
                result.nodes, result.virtual_s, result.wall_s = [1, 16, 64], 15.0, 20.0
            for n_nodes in result.nodes:
                with postgres_database(server_url) as store_url:
                    _simulate(report, store_url, broker_url, n_nodes, result)
    report.show(result.json)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _simulate(report: Report, store_url: str, broker_url: str, n_nodes: int, sizes: argparse.Namespace) -> None:
    submit_waiting(store_url, n_nodes * ROOM + sizes.queued, sizes.batches)
    cluster = SimulatedCluster(store_url, broker_url, n_nodes, sizes.rollout_s)
    try:
        cluster.fill()
        cluster.run(sizes.virtual_s, sizes.wall_s)
        _add(report, cluster, n_nodes, sizes.rollout_s)
    finally:
        cluster.close()


def submit_waiting(store_url: str, n: int, n_batches: int) -> None:
    """Submit at least `n` empty rollouts to a new store, in so many batches."""
    store = Store(store_url)
    try:
        migrations.migrate(store)
    finally:
        store.close()
    n_instances = max(1, -(-n // (n_batches * _N_SAMPLES)))
    with farm.connect(store_url, broker_url="") as client:
        for _ in range(n_batches):
            instances = [{"data_source": "noop", "fields": {}}] * n_instances
            client.submit({"instances": instances, "n_samples": _N_SAMPLES})


def _add(report: Report, cluster: SimulatedCluster, n_nodes: int, rollout_s: float) -> None:
    lasted_s = cluster.time()
    n_slots = n_nodes * SLOTS[Stage.RUN]
    busy = sum(node.busy_s for node in cluster.nodes.values()) / (n_slots * lasted_s)
    wanted_per_s = n_slots / rollout_s
    rounds = cluster.rounds
    n_placed = sum(n for _, n in rounds)
    cores = _cores(cluster.meter.costs, lasted_s, wanted_per_s, n_nodes)
    cores_of_all = sum(cores.values())
    aim = next((aim for most, aim in _AIM.items() if n_nodes <= most), None)
    report.add(
        f"{n_nodes}_nodes_efficiency",
        busy * min(1.0, CORES / cores_of_all) * 100,
        "%",
        at_least=aim,
        slots_in_use=busy * 100,
        virtual_s=lasted_s,
        finished_per_s=cluster.n_finished / lasted_s,
        wanted_per_s=wanted_per_s,
    )
    report.add(f"{n_nodes}_nodes_database", cores_of_all, "cores", **cores)
    report.add(
        f"{n_nodes}_nodes_dispatcher",
        sum(took_s for took_s, _ in rounds) / lasted_s * 100,
        "% busy",
        placed_per_s=n_placed / lasted_s,
        placed_per_round=n_placed / len(rounds),
    )
    report.times(f"{n_nodes}_nodes_round", [took_s for took_s, _ in rounds])
    if delays_s := [delay_s for node in cluster.nodes.values() for delay_s in node.claim_delays_s]:
        report.times(f"{n_nodes}_nodes_free_slot_to_claim", delays_s)


def _cores(costs: Mapping[str, Cost], lasted_s: float, wanted_per_s: float, n_nodes: int) -> dict[str, float]:
    """Return how many cores of the database each part uses at the wanted rate."""
    life_s = sum(costs[kind].of_one_in_database_s * n for kind, n in _OF_LIFE.items())
    polls_s = sum(costs[kind].of_one_in_database_s * per_s for kind, per_s in PERIODIC.items())
    return {
        "transitions": life_s * wanted_per_s,
        "polls": polls_s * n_nodes,
        "dispatcher": costs["dispatcher"].database_s / lasted_s,
    }


if __name__ == "__main__":
    main()
