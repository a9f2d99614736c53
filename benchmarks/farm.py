"""Overhead of the farm: rollouts per second, CPU time and latency of an empty rollout, memory of a waiting one, and the
time to collect a batch.

The empty rollout has no sandbox and no LLM; it passes all three stages, with claims, leases, attempts, rewards and the
finish, on both databases; and again as one whose handler needs no sandbox, which has no init stage. For comparison: a
plain Celery chain of three empty tasks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import farm
from benchmarks.peers import plain
from farm.embedded.embedded_farm import Embedded
from farm.embedded.own_redis import start_redis
from farm.records.trajectory import Segment
from farm.settings import Settings, settings
from farm.store import batches, migrations, placement, rollouts, trajectories
from farm.store.access.sealed_secrets import SecretKey
from farm.store.database import Store
from farm.store.rollouts import RunSummary
from testkit.postgres import postgres_server
from testkit.private_server import Missing
from testkit.processes import cpu_s, memory_mb, named, tree
from testkit.report import Report, options
from workers.testing import plugin_path
from workers.testing.engine import ScriptedEngine
from workers.testing.scripted_model import Script
from workers.testing.serving import serving

Instance = dict[str, Any]
NODE_OPTIONS = ("--init", "8", "--run", "64", "--eval", "8")
NOOP: Instance = {"data_source": "noop", "fields": {}}
EMPTY: Instance = {"data_source": "empty", "fields": {}}


def main() -> None:
    result = options(__doc__)
    plugin_path.install()
    report = Report("the farm's own cost")
    with tempfile.TemporaryDirectory(prefix="farm-benchmark-") as folder, ExitStack() as stack:
        urls = {"sqlite": f"sqlite:///{folder}/farm.db"}
        try:
            urls["postgres"] = stack.enter_context(postgres_server())
        except Missing as missing:
            print(f"no Postgres: {missing}", file=sys.stderr)
        raw = plain_chain(Path(folder), 200 if result.quick else 3000)
        for name, url in urls.items():
            with Embedded(_settings(Path(folder) / name, url), node_options=NODE_OPTIONS, flower=False) as here:
                empty_rollouts(report, name, here, result, raw)
            collecting(report, name, url, result)
        waiting_rollouts(report, Path(folder) / "waiting", result)
    report.show(result.json)


def _settings(home: Path, url: str = "") -> Settings:
    return Settings(home=home, scratch=home / "scratch", store_url=url, broker_url="", sandbox="namespace")


def empty_rollouts(report: Report, name: str, here: Embedded, args: argparse.Namespace, raw: float) -> None:
    """Measure latencies one at a time, then the rate and the CPU time of many."""
    with farm.connect(here.store_url, broker_url=here.broker_url) as client:
        run_batch(client, 40)  # the workers' first tasks import and connect
        latencies = sorted(run_batch(client, 1) for _ in range(15 if args.quick else 300))
        report.add(f"{name}_latency_p50", statistics.median(latencies) * 1000, "ms")
        report.add(f"{name}_latency_p99", latencies[int(len(latencies) * 0.99)] * 1000, "ms")
        _rate(report, name, client, args, raw)
        run_batch(client, 1, EMPTY)
        while not any(node.without_sandbox for node in client.nodes()):
            time.sleep(0.1)
        run_batch(client, 40, EMPTY)
        _rate(report, f"{name}_without_init", client, args, raw, EMPTY)


def _rate(
    report: Report, name: str, client: farm.Farm, args: argparse.Namespace, raw: float, instance: Instance = NOOP
) -> None:
    processes = tree(os.getpid())
    rates, cpu = [], []
    n = 500 if args.quick else 3000
    for _ in range(1 if args.quick else 3):
        before = cpu_s(processes)
        rates.append(n / run_batch(client, n, instance))
        cpu.append((cpu_s(processes) - before) / n)
    report.add(f"{name}_rollouts_per_s", statistics.median(rates), "1/s", plain_celery_chain=raw)
    report.add(f"{name}_cpu_per_rollout", statistics.median(cpu) * 1000, "ms")


def run_batch(client: farm.Farm, n: int, instance: Instance = NOOP) -> float:
    """Return the seconds from submit until n empty rollouts have ended."""
    started = time.perf_counter()
    batch_id = client.submit({"instances": [instance] * n})
    status = client.wait(batch_id, 300)
    elapsed_s = time.perf_counter() - started
    if status.n_completed != n:
        raise RuntimeError(f"{status.n_completed} of {n} empty rollouts were scored")
    return elapsed_s


def plain_chain(folder: Path, n: int) -> float:
    """Return the chains per second of plain Celery, with its defaults, on the same kind of pools."""
    redis, url = start_redis(folder / "plain", folder / "redis.log")
    try:
        with plain.workers(url, folder / "plain.log"):
            return n / plain.run_batch(url, n)
    finally:
        redis.terminate()
        redis.end(5.0)


def collecting(report: Report, name: str, url: str, args: argparse.Namespace) -> None:
    """Read 1,024 rollouts of 8k response tokens from the store into numpy arrays."""
    store = Store(url)
    try:
        migrations.migrate(store)
        batch_id, raw = _stored_batch(store)
    finally:
        store.close()
    with farm.connect(url, broker_url="") as client:
        times = []
        for _ in range(3 if args.quick else 7):
            started = time.perf_counter()
            result = client.collect(batch_id, timeout_s=0)
            times.append(time.perf_counter() - started)
        n_tokens = sum(len(segment.response_ids) for rollout in result for segment in rollout.segments)
        assert (len(result), n_tokens) == (1024, 1024 * 8000)
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        np.savez(file, *raw)
        started = time.perf_counter()
        with np.load(file.name) as loaded:
            for key in loaded.files:
                loaded[key]
        plain_s = time.perf_counter() - started
    report.add(f"{name}_collect_1024x8k", statistics.median(times), "s", npz_file=plain_s)


def _stored_batch(store: Store) -> tuple[str, list[np.ndarray]]:
    """Return a finished batch with random tokens, written through the store's own transitions, and its arrays."""
    request = farm.BatchRequest(instances=(farm.Instance(data_source="noop", fields={}),) * 128, n_samples=8)
    batch_id, _ = store.write(
        lambda connection: batches.create(connection, request, "benchmark", SecretKey.of(settings(), store.engine.url))
    )
    random = np.random.default_rng(0)
    raw: list[np.ndarray] = []
    for each in store.read(lambda connection: placement.next_of(connection, batch_id, 2000)):
        segment = Segment(
            random.integers(0, 150_000, 500, dtype=np.int32),
            random.integers(0, 150_000, 8000, dtype=np.int32),
            np.ones(8000, np.uint8),
            -random.random(8000, dtype=np.float32),
            np.full(8000, 3, np.int32),
        )
        values = [getattr(segment, field) for field in segment.__slots__]
        raw += [value for value in values if isinstance(value, np.ndarray)]
        message = placement.StageMessage(each.rollout_id, each.attempt, each.stage, "benchmark")
        store.submit(lambda connection, m=message, segment=segment: _finish(connection, batch_id, m, segment))  # type: ignore[misc]
    store.write(lambda connection: None)
    return batch_id, raw


def _finish(connection, batch_id: str, message: placement.StageMessage, segment: Segment) -> None:  # type: ignore[no-untyped-def]
    placement.place(connection, [message], 3.0)
    summary = RunSummary("submitted", {}, n_turns=1, n_response_tokens=8000)
    for stage in farm.Stage:
        held = rollouts.claim(connection, message.rollout_id, message.attempt, stage, message.node, "benchmark", 60.0)
        assert held is not None
        if stage is farm.Stage.EVAL:
            rollouts.finish(connection, held, 1.0, {}, "benchmark")
        else:
            rollouts.advance(connection, held, 3.0, summary if stage is farm.Stage.RUN else None)
    trajectories.store_segments(connection, message.rollout_id, batch_id, message.attempt, [segment])


def waiting_rollouts(report: Report, home: Path, args: argparse.Namespace) -> None:
    """Measure the memory of a run worker while 256 rollouts wait for a slow policy, beyond its idle memory."""
    n = 256
    policy = ScriptedEngine(Script([]))
    with serving(policy.app()) as url:
        widths = ("--init", "8", "--run", str(n), "--eval", "8", "--room", str(n + 16))
        env = {"FARM_POLICY_URL": f"{url}/v1"}
        with (
            Embedded(_settings(home), node_options=widths, flower=False, env=env) as here,
            farm.connect(here.store_url, broker_url=here.broker_url) as client,
        ):
            client.wait(client.submit({"instances": [{"data_source": "chat", "fields": {"question": "warm up"}}]}), 60)
            # only after the farm has probed it, which takes minutes with such a slow one
            policy.scheduler.speed = replace(policy.scheduler.speed, latency_s=6.0 if args.quick else 15.0)
            worker = named(tree(os.getpid()), "-n run@")
            before = memory_mb(worker)
            instances = [{"data_source": "chat", "fields": {"question": f"{i}"}} for i in range(n)]
            batch_id = client.submit({"instances": instances})
            while client.status(batch_id).stages[farm.Stage.RUN][farm.State.ACTIVE] < n:
                time.sleep(0.05)
            time.sleep(0.5)  # the last of them have sent their request
            during = memory_mb(worker)
            client.wait(batch_id, 120)
    report.add("memory_per_waiting_rollout", (during - before) / n, "MB", idle_worker=before, with_256=during)


if __name__ == "__main__":
    main()
