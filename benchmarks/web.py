"""The page with 100 and with 100,000 rollouts in a batch: server time and bytes of each view, on SQLite and Postgres.

A tenth of the rollouts have failed, and 2,000 of the large batch have not ended. Each view is requested five times over
loopback, signed in; the first time is given separately, as all viewers share the numbers of a batch for a second. For
comparison, in the same run, the database itself: one row by its key, and a count of the batch.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from sqlalchemy import Connection, func, insert, select, text

from farm.api.app import ApiServer, ConnectionLimits
from farm.api.endpoints import ApiConfig, Endpoints
from farm.cli.listening import bind, url_of
from farm.client.local import LocalFarm
from farm.ids import rollout_id
from farm.notifications import Signals
from farm.records.trajectory import ModelCall, token_ids
from farm.settings import settings
from farm.startup import limit_full_collections
from farm.store import migrations, rollout_counts, trajectories
from farm.store.database import Store
from farm.store.rollouts import batches, rollouts
from farm.store.sql.schema import MeasuredBatchRow
from farm.web.app import application
from testkit.postgres import postgres_server
from testkit.report import Report, options

KEY = "of-this-benchmark"
SIZES = (100, 100_000)
N_SAMPLES = 8
_AGAIN = 5
VIEWS = {
    "list of batches": "/",
    "batch": "/batches/{b}",
    "rollouts, newest": "/batches/{b}/rollouts",
    "rollouts, by reward": "/batches/{b}/rollouts?order=reward",
    "rollouts, failed": "/batches/{b}/rollouts?state=failed",
    "rollouts, one of a rare node": "/batches/{b}/rollouts?node=rare",
    "rollouts, active": "/batches/{b}/rollouts?state=active",
    "failures": "/batches/{b}/failures",
    "figures": "/batches/{b}/figures",
    "selection": "/batches/{b}/selection",
    "samples side by side": "/groups/{b}.0",
    "transcript, 40 turns": "/rollouts/{b}.0.0",
    "terminal, 40 turns": "/rollouts/{b}.0.0/terminal",
    "tokens, 40 turns": "/rollouts/{b}.0.0/tokens",
    "timeline": "/rollouts/{b}.0.0/timeline",
    "nodes and engines": "/cluster",
}


def main() -> None:
    arguments = options(__doc__)
    sizes = (100, 10_000) if arguments.quick else SIZES
    report = Report("the page: milliseconds of server time")
    limit_full_collections()  # as in `farm api`
    with tempfile.TemporaryDirectory(prefix="farm-web-") as folder:
        measure(report, "SQLite", f"sqlite:///{Path(folder) / 'farm.db'}", sizes)
    with postgres_server() as url:
        measure(report, "Postgres", url, sizes)
    report.show(arguments.json)


def measure(report: Report, name: str, url: str, sizes: tuple[int, ...]) -> None:
    """Fill a database and measure its views."""
    store = Store(url)
    try:
        migrations.migrate(store)
        ids = {n: fill(store, n) for n in sizes}
        if name == "Postgres":
            with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text("VACUUM ANALYZE"))
        for n, batch_id in ids.items():
            of_batch = f"{name}, {n:,} rollouts"
            one_row = select(rollouts.c.state).where(rollouts.c.rollout_id == rollout_id(batch_id, 0, 0))
            count = select(func.count()).where(rollouts.c.batch_id == batch_id, rollouts.c.reward > 0)
            report.times(f"{of_batch}: one row of the database", list(_query_times(store, one_row)))
            report.times(f"{of_batch}: a count in the database", list(_query_times(store, count)))
            with _served(store) as address, httpx2.Client(base_url=f"{address}/web", timeout=60) as client:
                client.post("/sign-in", data={"key": KEY})
                for view, path in VIEWS.items():
                    took, size = _looked(client, path.format(b=batch_id))
                    report.times(f"{of_batch}: {view} ({size / 1000:.0f} kB, first {took[0] * 1000:.0f} ms)", took[1:])
    finally:
        store.close()


def _query_times(store: Store, statement: Any) -> Iterator[float]:
    for _ in range(_AGAIN):
        started = time.perf_counter()
        store.read(lambda connection: connection.execute(statement).all())
        yield time.perf_counter() - started


def _looked(client: httpx2.Client, path: str) -> tuple[list[float], int]:
    took = []
    for _ in range(_AGAIN + 1):
        started = time.perf_counter()
        answer = client.get(path)
        took.append(time.perf_counter() - started)
        answer.raise_for_status()
    return took, len(answer.content)


@contextmanager
def _served(store: Store) -> Iterator[str]:
    listener = bind("127.0.0.1", 0)
    ready = threading.Event()
    endpoints = Endpoints(LocalFarm(store, Signals(""), 10**9), ApiConfig.of(settings()))
    server = ApiServer(endpoints, KEY, ready.set, ConnectionLimits(), page=application)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    with listener:
        thread.start()
        ready.wait(30)
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join(30)


def fill(store: Store, n: int) -> str:
    """Write a batch with 98 % ended rollouts, one of them with 40 turns. Returns its id."""
    batch_id = f"b{n:010x}"
    drawn = np.random.default_rng(n)
    n_live = n // 50
    batch = {
        "batch_id": batch_id,
        "idempotency_key": None,
        "fingerprint": "f" * 64,
        "created_at": 1e9,
        "n_samples": N_SAMPLES,
        "n_rollouts": n,
        "last_seq": n - n_live,
        "priority": 0,
        "max_attempts": 3,
        "request": {"n_samples": N_SAMPLES},
    }
    store.write(lambda connection: connection.execute(insert(batches), batch) and None)
    for start in range(0, n, 5000):
        rows = [_row(batch_id, at, drawn, at >= n - n_live) for at in range(start, min(n, start + 5000))]
        store.write(lambda connection, rows=rows: connection.execute(insert(rollouts), rows) and None)  # type: ignore[misc]
    store.write(lambda connection: _sum_up(connection, batch_id, n - n_live))
    log = trajectories.CallLog(rollout_id(batch_id, 0, 0), 1)
    ids = list(range(300))
    for index in range(40):
        call = _call(index, ids)
        ids = [*ids, *range(index, index + 250)]
        store.write(lambda connection, call=call: trajectories.record_call(connection, log.row(call)))  # type: ignore[misc]
    return batch_id


def _sum_up(connection: Connection, batch_id: str, last: int) -> None:
    """Sum up the ended rollouts, as the leading dispatcher has done of a batch that runs."""
    connection.execute(insert(MeasuredBatchRow), {"batch_id": batch_id, "seq": last})
    rollout_counts.sum_up(connection, batch_id, last)


def _row(batch_id: str, at: int, drawn: np.random.Generator, live: bool) -> dict[str, Any]:
    failed = not live and at % 10 == 3
    group, sample = divmod(at, N_SAMPLES)
    ended = {"finished_at": 1e9 + at / 100, "finish_seq": at + 1, "n_turns": int(drawn.integers(1, 30))}
    state = "active" if live else "failed" if failed else "completed"
    return {
        "rollout_id": rollout_id(batch_id, group, sample),
        "batch_id": batch_id,
        "group_index": group,
        "sample_index": sample,
        "data_source": ("math", "code", "swe")[group % 3],
        "instance_id": f"instance-{group}",
        "stage": "run" if live else "eval",
        "state": state,
        "attempt": 1,
        "n_failures": int(failed),
        "node": "rare" if at == 7 else f"node-{at % 16}",
        "queued_at": 1e9,
        "ready_at": 1e9,
        "resend_at": 1e9,
        "n_sends": 0,
        "submitted_at": 1e9,
        "reward": None if live or failed else float(drawn.integers(0, 5)) / 4,
        "outcome": None if live else "engine_error" if failed else "submitted",
        "failure_kind": "engine_error" if failed else None,
        "failure_message": f"the engine answered 50{at % 3}\nand more" if failed else None,
        "n_response_tokens": int(drawn.integers(10, 9000)),
        **({"finished_at": None, "finish_seq": None, "n_turns": 0} if live else ended),
    }


def _call(index: int, ids: list[int]) -> ModelCall:
    return ModelCall(
        index=index,
        messages=[{"role": "user", "content": "What is there?"}] if index == 0 else [],
        response={
            "role": "assistant",
            "content": "I look. " * 20,
            "tool_calls": [{"function": {"name": "bash", "arguments": '{"command": "ls -la"}'}}],
        },
        observations=[{"role": "tool", "content": "a line of output\n" * 60}],
        finish_reason="stop",
        engine="http://engine/v1",
        started_at=1e9 + index,
        latency_s=0.5,
        n_prompt_tokens=len(ids),
        n_response_tokens=50,
        prompt_ids=token_ids(ids),
        response_ids=token_ids(list(range(50))),
        response_logprobs=np.full(50, -0.1, np.float32),
    )


if __name__ == "__main__":
    main()
