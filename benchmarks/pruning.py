"""`farm prune` of 200,000 ended rollouts, on SQLite and Postgres, next to a farm that runs and audits batches.

Each rollout has three stages, two model calls, a training row and a score, and each fourth an artefact. During the
pruning another process submits batches, claims, advances and finishes their rollouts, reads them and audits; for
comparison, it does the same without pruning.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from sqlalchemy import Connection, func, insert, select

from farm.client.local import LocalFarm
from farm.ids import rollout_id
from farm.notifications import Signals
from farm.records.node import Node
from farm.records.request import BatchRequest, Instance
from farm.records.rollout import Stage
from farm.records.trajectory import Segment, token_ids
from farm.settings import settings
from farm.store import batches, migrations, nodes, placement
from farm.store import rollouts as transitions
from farm.store.access.sealed_secrets import SecretKey
from farm.store.blobs.artefacts import artefacts
from farm.store.database import Store, Work
from farm.store.reports import audit
from farm.store.retention.kept import RetentionLevel
from farm.store.retention.pruning import Pruner
from farm.store.rollouts import Claim, RunSummary, attempts, instances, rewards, rollouts
from farm.store.rollouts import batches as batch_rows
from farm.store.sql.clock import db_now
from farm.store.trajectories import model_calls, segment_rows
from testkit.postgres import postgres_server
from testkit.report import Report, options

T = TypeVar("T")
N_SAMPLES = 8
_N_BATCH = 1000
_BEFORE_S = 15.0
_DAY_S = 86_400.0
_NODE = "n1"
WORDS = "It looks around, and says what it sees. " * 40


class TimedStore(Store):
    """A store that notes how long each of its writes took."""

    times: list[float]

    def write(self, work: Work[T], *, urgent: bool = False, batch_id: str = "", rollout_id: str = "") -> T:
        began = time.monotonic()
        try:
            return super().write(work, urgent=urgent, batch_id=batch_id, rollout_id=rollout_id)
        finally:
            self.times.append(time.monotonic() - began)


def main() -> None:
    arguments = options(__doc__)
    n = 10_000 if arguments.quick else 200_000
    report = Report("pruning while a farm runs rollouts")
    with tempfile.TemporaryDirectory(prefix="farm-prune-") as folder:
        measure(report, "SQLite", f"sqlite:///{Path(folder) / 'farm.db'}", n)
    with postgres_server() as url:
        measure(report, "Postgres", url, n)
    report.show(arguments.json)


def measure(report: Report, name: str, url: str, n: int) -> None:
    """Fill a database, and prune it while another process works on it."""
    store = TimedStore(url)
    store.times = []
    try:
        migrations.migrate(store)
        for index in range(n // _N_BATCH):
            fill(store, index)
        with ForegroundLoad(url) as earlier:
            time.sleep(_BEFORE_S)
        store.times.clear()
        with ForegroundLoad(url) as meanwhile:
            began = time.monotonic()
            done = Pruner(store).prune(14 * _DAY_S, RetentionLevel.REWARDS)
            took_s = time.monotonic() - began
        left = select(func.count()).where(model_calls.c.started_at < db_now() - 14 * _DAY_S)
        assert store.read(lambda connection: connection.execute(left).scalar_one()) == 0
        report.add(f"{name}: pruned", sum(each.n_rollouts for each in done) / took_s, "rollouts/s")
        report.times(f"{name}: a write transaction of the pruning", store.times)
        report.add(f"{name}: the longest", max(store.times) * 1000, "ms")
        for verb in earlier.times:
            before, during = earlier.times[verb], meanwhile.times[verb]
            report.times(f"{name}: {verb}", during, without_removal=statistics.median(before) * 1000)
            report.add(f"{name}: {verb}, the longest", max(during) * 1000, "ms", without_removal=max(before) * 1000)
    finally:
        store.close()


class ForegroundLoad:
    """Another process that works on the store while the block runs; `times` are its seconds by operation."""

    def __init__(self, url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(url, theirs), daemon=True)
        self.times: dict[str, list[float]] = {}

    def __enter__(self) -> ForegroundLoad:
        self._process.start()
        assert self._ours.recv() == "began"
        return self

    def __exit__(self, *failure: object) -> None:
        self._ours.send("end")
        self.times = self._ours.recv()
        self._process.join(30)


def work(url: str, parent: Pipe) -> None:
    """Submit, run, read and audit batches one after the other, until the parent sends a message."""
    store = Store(url)
    farm = LocalFarm(store, Signals(""), 10**9)
    node = Node(_NODE, 64, 64, 64, 64, ["noop"], {})
    store.write(lambda connection: nodes.announce(connection, node))
    times: dict[str, list[float]] = {}

    def timed(verb: str, action: Callable[[], T]) -> T:
        began = time.monotonic()
        result = action()
        times.setdefault(verb, []).append(time.monotonic() - began)
        return result

    parent.send("began")
    while not parent.poll():
        batch_id = timed("submit of 64", lambda: _submitted(store))
        for id in timed("place 64", lambda: _placed(store, batch_id)):  # noqa: B023
            _run_rollout(store, id, timed)
        timed("collect of 64", lambda: farm.collect(batch_id))  # noqa: B023
        timed("audit", lambda: store.read(lambda connection: audit.violations(connection, batch_id)))  # noqa: B023
        timed("list of batches", farm.batches)
    parent.send(times)
    store.close()


def _submitted(store: Store) -> str:
    one = Instance(data_source="noop", fields={})
    request = BatchRequest(instances=(one,) * 8, n_samples=N_SAMPLES)
    return store.write(
        lambda connection: batches.create(connection, request, "f", SecretKey.of(settings(), store.engine.url))
    )[0]


def _placed(store: Store, batch_id: str) -> list[str]:
    found = store.read(lambda connection: placement.next_of(connection, batch_id, 64))
    messages = [placement.StageMessage(each.rollout_id, each.attempt, each.stage, _NODE) for each in found]
    store.write(lambda connection: placement.place(connection, messages, 3.0))
    return [each.rollout_id for each in found]


def _run_rollout(store: Store, id: str, timed: Callable[[str, Callable[[], Any]], Any]) -> None:
    summary = RunSummary(policy_outcome="submitted", submission={"answer": "42"}, n_turns=1, n_response_tokens=2)
    for stage in Stage:

        def claimed(connection: Connection, stage: Stage = stage) -> Any:
            return transitions.claim(connection, id, 1, stage, _NODE, "w", 60.0)

        held = timed("claim", lambda: store.write(claimed))
        assert held is not None

        def ended(connection: Connection, held: Claim = held) -> bool:
            if held.stage is Stage.EVAL:
                return transitions.finish(connection, held, 1.0, {}, "benchmark")
            return transitions.advance(connection, held, 3.0, summary if held.stage is Stage.RUN else None)

        assert timed("advance or finish", lambda: store.write(ended))


def fill(store: Store, index: int) -> str:
    """Write a batch that ended a month ago. Returns its id."""
    batch_id = f"b{index:010x}"
    ended = db_now_of(store) - 30 * _DAY_S
    batch = {
        **{"batch_id": batch_id, "idempotency_key": None, "fingerprint": "f" * 64, "created_at": ended},
        **{"n_samples": N_SAMPLES, "n_rollouts": _N_BATCH, "last_seq": _N_BATCH, "priority": 0, "max_attempts": 3},
        "request": {"n_samples": N_SAMPLES},
    }
    rows = [_row(batch_id, at, ended) for at in range(_N_BATCH)]
    ids = [row["rollout_id"] for row in rows]
    tables: list[tuple[Any, list[dict[str, Any]]]] = [
        (batch_rows, [batch]),
        (instances, [_instance(batch_id, group) for group in range(_N_BATCH // N_SAMPLES)]),
        (rollouts, rows),
        (attempts, [_attempt(id, stage, ended) for id in ids for stage in Stage]),
        (model_calls, [_call(id, at, ended) for id in ids for at in range(2)]),
        (segment_rows, [_segment(id, batch_id) for id in ids]),
        (rewards, [_reward(id, ended) for id in ids]),
        (artefacts, [_artefact(id, ended) for id in ids[::4]]),
    ]
    for table, values in tables:
        store.write(lambda connection, table=table, values=values: connection.execute(insert(table), values) and None)  # type: ignore[misc]
    return batch_id


def db_now_of(store: Store) -> float:
    return float(store.read(lambda connection: connection.execute(select(db_now())).scalar_one()))


def _instance(batch_id: str, group: int) -> dict[str, Any]:
    fields = {"question": "What is there? " * 30}
    return {
        **{"batch_id": batch_id, "group_index": group, "data_source": "noop", "instance_id": f"i{group}"},
        "fields": fields,
    }


def _row(batch_id: str, at: int, ended: float) -> dict[str, Any]:
    group, sample = divmod(at, N_SAMPLES)
    return {
        **{"rollout_id": rollout_id(batch_id, group, sample), "batch_id": batch_id, "group_index": group},
        **{"sample_index": sample, "data_source": "noop", "instance_id": f"i{group}", "stage": "eval"},
        **{"state": "completed", "attempt": 1, "n_failures": 0, "node": "n0", "queued_at": ended, "ready_at": ended},
        **{"resend_at": ended, "n_sends": 0, "submitted_at": ended, "reward": 0.5, "outcome": "submitted"},
        **{"policy_outcome": "submitted", "submission": {"answer": "42"}, "n_turns": 2, "n_response_tokens": 100},
        **{"n_segments": 1, "finished_at": ended, "finish_seq": at + 1},
    }


def _attempt(id: str, stage: Stage, ended: float) -> dict[str, Any]:
    times = {"queued_at": ended, "started_at": ended, "finished_at": ended}
    return {"rollout_id": id, "attempt": 1, "stage": stage.value, "node": "n0", "worker": "w", "result": "ok", **times}


def _call(id: str, at: int, ended: float) -> dict[str, Any]:
    return {
        **{"rollout_id": id, "attempt": 1, "call_index": at, "messages": [{"role": "user", "content": WORDS}]},
        **{"response": {"role": "assistant", "content": WORDS[:400]}, "observations": [], "finish_reason": "stop"},
        **{"engine": "http://engine/v1", "policy_version": "1", "sampling": {}, "started_at": ended, "latency_s": 1.0},
        **{"n_prompt_tokens": 400, "n_response_tokens": 50, "prompt_ids": _IDS, "response_ids": _IDS[:50]},
        "response_logprobs": np.zeros(50, np.float32),
    }


_IDS = token_ids(list(range(400)))


def _segment(id: str, batch_id: str) -> dict[str, Any]:
    row = Segment(_IDS, _IDS[:50], np.ones(50, np.uint8), np.zeros(50, np.float32), np.zeros(50, np.int32))
    names = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "policy_versions")
    keys = {"rollout_id": id, "segment_index": 0, "batch_id": batch_id, "attempt": 1}
    return keys | {name: getattr(row, name) for name in names}


def _reward(id: str, ended: float) -> dict[str, Any]:
    return {
        **{"rollout_id": id, "attempt": 1, "value": 0.5, "details": {"why": "half"}, "evaluator": "benchmark"},
        "created_at": ended,
    }


def _artefact(id: str, ended: float) -> dict[str, Any]:
    return {
        **{"rollout_id": id, "attempt": 1, "name": "out", "media_type": "text/plain", "n_bytes": 20_000},
        **{"data": b"x" * 4_000, "created_at": ended},
    }


if __name__ == "__main__":
    main()
