"""Real nodes of one farm on this machine: the utilization of their run slots, compared with one node."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sqlalchemy import select

import farm
from farm.embedded.child_process import ChildProcess
from farm.records.rollout import Stage
from farm.store import migrations
from farm.store.database import Store
from farm.store.rollouts import attempts, rollouts
from testkit.report import Report

_SLOTS, _ROLLOUT_S, _WAVES = 16, 10.0, 6
_READY_S = 300.0


def compare_real_nodes(report: Report, folder: Path, store_url: str, broker_url: str, n_nodes: int) -> None:
    """Run the same number of rollouts per slot on one node and on many, and report the efficiency of both."""
    store = Store(store_url)
    migrations.migrate(store)
    store.close()
    shares = {}
    for n in (1, n_nodes):
        with _nodes(folder / f"of_{n}", store_url, broker_url, n):
            shares[n] = _share_in_use(store_url, broker_url, n)
    report.add(f"{n_nodes}_real_nodes_efficiency", shares[n_nodes] * 100, "%", of_one_node=shares[1] * 100)


@contextmanager
def _nodes(folder: Path, store_url: str, broker_url: str, n: int) -> Iterator[None]:
    folder.mkdir()
    env = os.environ | {"FARM_STORE_URL": store_url, "FARM_BROKER_URL": broker_url, "FARM_SANDBOX": "namespace"}
    env |= {"FARM_HOME": str(folder / "home"), "FARM_SCRATCH": str(folder / "scratch")}
    command = [sys.executable, "-m", "workers.node", "--init", "2", "--run", str(_SLOTS), "--eval", "2", "--grace", "0"]
    with ExitStack() as stack:
        for number in range(n):
            name = f"node{number}"
            log = folder / f"{name}.log"
            process = ChildProcess(command, env=env | {"FARM_NODE": name}, log=log, on_parent_death=signal.SIGTERM)
            stack.callback(process.end, 30.0)
            stack.callback(process.terminate)
        with farm.connect(store_url, broker_url=broker_url) as client:
            deadline = time.monotonic() + _READY_S
            while sum(node.state == "up" for node in client.nodes()) < n:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{n} nodes were not up after {_READY_S:g} s; their logs: {folder}")
                time.sleep(0.2)
            client.wait(client.submit({"instances": [{"data_source": "noop", "fields": {}}] * (n * 8)}), _READY_S)
        yield


def _share_in_use(store_url: str, broker_url: str, n_nodes: int) -> float:
    """Run a few rollouts per slot; return the utilization of slots from the first start until none waits."""
    n_slots = n_nodes * _SLOTS
    instances = [
        {"data_source": "noop", "fields": {"seconds": _ROLLOUT_S * (0.8 + 0.4 * (index * 7 % 16) / 15)}}
        for index in range(n_slots * _WAVES)
    ]
    with farm.connect(store_url, broker_url=broker_url) as client:
        batch_id = client.submit({"instances": instances})
        client.wait(batch_id, _READY_S + _ROLLOUT_S * _WAVES)
    statement = (
        select(attempts.c.started_at, attempts.c.finished_at)
        .join(rollouts, rollouts.c.rollout_id == attempts.c.rollout_id)
        .where(rollouts.c.batch_id == batch_id, attempts.c.stage == Stage.RUN.value)
    )
    store = Store(store_url)
    try:
        spans = store.read(lambda connection: connection.execute(statement).tuples().all())
    finally:
        store.close()
    first, last = min(started for started, _ in spans), max(started for started, _ in spans)
    busy_s = sum(min(finished, last) - started for started, finished in spans if finished is not None)
    return float(busy_s / (n_slots * (last - first)))
