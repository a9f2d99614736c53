"""Solve rates of instances counted from a million rollouts: how long a sampler waits for them.

A run of 17,000 instances with 750,000 scored rollouts, and another run of 250,000 with the same instances, on SQLite
and on Postgres. Queries for 16 and 256 instances, drawn each time, over all weights and over the last 50 versions;
then for all instances at once.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import insert, text

from farm.store import migrations
from farm.store.database import Store
from farm.store.reports.summaries import solve_rates
from farm.store.rollouts import batches, rollouts
from testkit.postgres import postgres_server
from testkit.report import Report, options

N_INSTANCES = 17_000
N_SAMPLES = 8
N_OF_A_BATCH = 1000
BATCHES_OF_A_VERSION = 8
WINDOW = 50
_SIZES = (16, 256)


def main() -> None:
    arguments = options(__doc__)
    n_batches = 100 if arguments.quick else 1000
    report = Report(f"solve rates, counted from {n_batches * N_OF_A_BATCH:,} rollouts")
    with tempfile.TemporaryDirectory(prefix="farm-rates-") as folder:
        measure(report, "SQLite", f"sqlite:///{Path(folder) / 'farm.db'}", n_batches)
    with postgres_server() as url:
        measure(report, "Postgres", url, n_batches)
    report.show(arguments.json)


def measure(report: Report, name: str, url: str, n_batches: int) -> None:
    """Fill a database and query it."""
    store = Store(url)
    try:
        migrations.migrate(store)
        fill(store, n_batches)
        if name == "Postgres":
            with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text("VACUUM ANALYZE"))
        newest = n_batches // BATCHES_OF_A_VERSION
        for window, min_version in (("all weights", None), (f"last {WINDOW} versions", newest - WINDOW + 1)):
            for n_chosen in _SIZES:
                report.times(f"{name}, {n_chosen} instances, {window}", list(times(store, n_chosen, min_version, 9)))
            report.times(f"{name}, all instances, {window}", list(times(store, None, min_version, 3)))
    finally:
        store.close()


def times(store: Store, n_chosen: int | None, min_version: int | None, n: int) -> Iterator[float]:
    """Yield the seconds of queries for some random instances."""
    drawn = random.Random(2)
    for _ in range(n):
        names = None if n_chosen is None else [_name(i) for i in drawn.sample(range(N_INSTANCES), n_chosen)]
        started = time.perf_counter()
        store.read(lambda connection: solve_rates(connection, "r", "math", names, min_version))  # noqa: B023
        yield time.perf_counter() - started


def fill(store: Store, n_batches: int) -> None:
    """Write ended batches; every fourth belongs to another run."""
    drawn = random.Random(1)
    for number in range(n_batches):
        batch = {
            "batch_id": f"b{number:010x}",
            "idempotency_key": f"r:wave-{number}",
            "fingerprint": "f" * 64,
            "created_at": float(number),
            "n_samples": N_SAMPLES,
            "n_rollouts": N_OF_A_BATCH,
            "last_seq": N_OF_A_BATCH,
            "priority": 0,
            "max_attempts": 3,
            "run": "r" if number % 4 else "other",
            "request": {"metadata": {"sampler": "s" * 400}},
        }
        with store.engine.begin() as connection:
            connection.execute(insert(batches), batch)
            connection.execute(insert(rollouts), list(_rollouts(number, str(batch["batch_id"]), drawn)))


def _rollouts(number: int, batch_id: str, drawn: random.Random) -> Iterator[dict[str, Any]]:
    for group, instance in enumerate(drawn.sample(range(N_INSTANCES), N_OF_A_BATCH // N_SAMPLES)):
        for sample in range(N_SAMPLES):
            yield {
                # ids as long as real ones, which need no parsing
                "rollout_id": f"{number:010x}-{group:04d}-{sample}",
                "batch_id": batch_id,
                "group_index": group,
                "sample_index": sample,
                "data_source": "math",
                "instance_id": _name(instance),
                "stage": "eval",
                "state": "completed",
                "attempt": 1,
                "n_failures": 0,
                "queued_at": 0.0,
                "ready_at": 0.0,
                "resend_at": 0.0,
                "n_sends": 1,
                "policy_outcome": "submitted",
                "outcome": "submitted",
                "submission": {"answer": "4" * 300},
                "reward": float(drawn.random() < 0.4),
                "n_turns": 5,
                "n_response_tokens": 900,
                "version_min": number // BATCHES_OF_A_VERSION,
                "version_max": number // BATCHES_OF_A_VERSION,
                "submitted_at": 0.0,
                "finished_at": float(number),
                "finish_seq": group * N_SAMPLES + sample + 1,
            }


def _name(instance: int) -> str:
    return f"problem-{instance:06d}"


if __name__ == "__main__":
    main()
