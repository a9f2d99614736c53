"""Cost of durability: rollouts per second through the farm's three stages, compared with the same stages as a plain
Celery chain without a store, on pools of the same width and on the same Redis, in turns.

A rollout of the farm is claimed and leased in each stage, its attempts and its reward are rows, and it ends exactly
once whatever fails. A plain chain writes nothing: the work of a killed worker is lost, or runs twice. It is measured
with Celery's defaults, and with the farm's own transport settings, which are faster but would lose more.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import farm
from benchmarks.peers import plain
from farm.embedded.embedded_farm import Embedded
from farm.embedded.own_redis import start_redis
from farm.settings import Settings
from testkit.postgres import postgres_server
from testkit.private_server import Missing
from testkit.processes import cpu_s, tree
from testkit.report import Report, options
from workers.testing import plugin_path

NODE_OPTIONS = ("--init", "8", "--run", "64", "--eval", "8")
NOOP = {"data_source": "noop", "fields": {}}


def main() -> None:
    result = options(__doc__)
    plugin_path.install()
    n, rounds = (200, 1) if result.quick else (1500, 5)
    report = Report("what durability costs")
    with tempfile.TemporaryDirectory(prefix="farm-durability-") as name, ExitStack() as stack:
        folder = Path(name)
        redis, broker_url = start_redis(folder / "redis", folder / "redis.log")
        stack.callback(redis.end, 5.0)
        stack.callback(redis.terminate)
        stores = {"sqlite": ""}
        try:
            stores["postgres"] = stack.enter_context(postgres_server())
        except Missing as missing:
            print(f"no Postgres: {missing}", file=sys.stderr)
        runners: dict[str, Callable[[int], float]] = {}
        for early in (False, True):
            # only one of the two kinds of workers may listen to the queues of the chain: each has its own database
            url = f"{broker_url}?virtual_host={1 + early}"
            stack.enter_context(plain.workers(url, folder / "plain.log", early))
            runners["plain_early" if early else "plain"] = partial(plain.run_batch, url, early=early)
        for index, (store, url) in enumerate(stores.items()):
            broker = f"{broker_url}?virtual_host={3 + index}"
            here = stack.enter_context(
                Embedded(_settings(folder / store, url, broker), node_options=NODE_OPTIONS, flower=False)
            )
            client = stack.enter_context(farm.connect(here.store_url, broker_url=here.broker_url))
            _run_batch(client, 40)  # starts the workers up
            runners[store] = partial(_run_batch, client)
        rates: dict[str, list[float]] = {name: [] for name in runners}
        cpu: dict[str, list[float]] = {name: [] for name in runners}
        processes = tree(os.getpid())
        for _ in range(rounds):
            for name, run in runners.items():
                before = cpu_s(processes)
                rates[name].append(n / run(n))
                cpu[name].append((cpu_s(processes) - before) / n)
    medians = {name: statistics.median(value) for name, value in rates.items()}
    cpu_ms = {name: statistics.median(value) * 1000 for name, value in cpu.items()}
    for name in stores:
        report.add(f"{name}_rollouts_per_s", medians[name], "1/s")
        report.add(
            f"{name}_cpu_per_rollout",
            cpu_ms[name],
            "ms",
            plain_chain=cpu_ms["plain"],
            with_the_farms_transport_settings=cpu_ms["plain_early"],
        )
        ratios = [farms / plains for farms, plains in zip(rates[name], rates["plain"], strict=True)]
        report.add(
            f"{name}_of_plain_celery",
            statistics.median(ratios) * 100,
            "%",
            plain_chains_per_s=medians["plain"],
            with_the_farms_transport_settings=medians["plain_early"],
        )
    report.show(result.json)


def _settings(home: Path, store_url: str, broker_url: str) -> Settings:
    return Settings(
        home=home, scratch=home / "scratch", store_url=store_url, broker_url=broker_url, sandbox="namespace"
    )


def _run_batch(client: farm.Farm, n: int) -> float:
    """Seconds from submit until n empty rollouts have ended."""
    started = time.perf_counter()
    batch_id = client.submit({"instances": [NOOP] * n})
    status = client.wait(batch_id, 300)
    elapsed_s = time.perf_counter() - started
    if status.n_completed != n:
        raise RuntimeError(f"{status.n_completed} of {n} empty rollouts were scored")
    return elapsed_s


if __name__ == "__main__":
    main()
