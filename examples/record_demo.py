"""Record a batch for `farm web --demo`: `python -m examples.record_demo`, after `make demo`.

It backs up the store of the demo's farm, keeps only the batch, adds GRPO advantages as a trainer's annotations, and
compresses the result. Keys, the audit log and the addresses of nodes and engines are removed.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import farm
from farm.client.local import LocalFarm, open_store
from farm.configuration.service_urls import sqlite_url
from farm.notifications import Signals
from farm.settings import settings
from farm.store.access.sealed_secrets import SecretKey
from farm.store.backups.backup import TABLES, back_up
from farm.store.database import Store
from farm.web.recorded_batch import FILE

PRODUCER = "grpo"
_KEPT = frozenset({"batches", "instances", "rollouts", "attempts", "model_calls", "rewards", "segments", "artefacts"})
_WITH_IT = frozenset({"epochs", "measured_batches"})
"""Tables that are kept unchanged."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batch", nargs="?", help="the batch; the newest one, if it is left out")
    parser.add_argument("--url", help="the demo's farm: its folder or its database; FARM_HOME, if it is left out")
    parser.add_argument("-o", "--output", type=Path, default=FILE)
    options = parser.parse_args()
    try:
        record(options.url, options.batch, options.output)
    except farm.FarmError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def record(url: str | None, batch_id: str | None, output: Path) -> None:
    """Write the recording of an ended batch. Raises FarmError."""
    with tempfile.TemporaryDirectory(prefix="farm-record-") as folder:
        copy = Path(folder) / "copy.db"
        with contextlib.closing(open_store(url)[0]) as store:
            back_up(store, SecretKey.of(settings(), store.engine.url), copy)
        with contextlib.closing(LocalFarm(Store(sqlite_url(copy)), Signals(""), settings().max_open)) as client:
            recorded = batch_id or client.recent(1)[0]
            if not client.status(recorded).done:
                raise farm.InvalidRequest(f"{recorded} has not ended: record it after its end", field="batch")
            n_figures = client.annotate(PRODUCER, 1, _advantages(client, recorded))
        _reduce(copy, recorded)
        with output.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
            packed.write(copy.read_bytes())
    print(f"{output}: batch {recorded}, {n_figures} figures, {output.stat().st_size / 1000:.0f} kB")


def _advantages(client: LocalFarm, batch_id: str) -> list[dict[str, Any]]:
    """Return each scored rollout's advantage in its group, for the rollout and for each sampled token."""
    scored = [each for each in client.collect(batch_id, timeout_s=0) if each.reward is not None]
    rewards: dict[str, list[float]] = {}
    for rollout in scored:
        rewards.setdefault(rollout.group_id, []).append(float(rollout.reward or 0.0))
    result: list[dict[str, Any]] = []
    for rollout in scored:
        group = np.asarray(rewards[rollout.group_id])
        advantage = (float(rollout.reward or 0.0) - group.mean()) / (group.std() + 1e-6)
        common = {"rollout_id": rollout.rollout_id, "name": "advantage"}
        result.append(common | {"value": float(advantage)})
        for row, segment in enumerate(rollout.segments):
            result.append(common | {"row": row, "tokens": advantage * np.asarray(segment.response_mask, np.float32)})
    return result


def _reduce(path: Path, batch_id: str) -> None:
    """Remove everything but one batch from a backup, and the files of its farm."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for table in reversed(TABLES):
            if table.name in _WITH_IT:
                continue
            where = ""
            if table.name in _KEPT | {"annotations"}:
                of_batch = "batch_id = ?" if "batch_id" in table.columns else "rollout_id GLOB ? || '.*'"
                where = f" WHERE NOT ({of_batch})"
            connection.execute(f'DELETE FROM "{table.name}"{where}', (batch_id,) if where else ())
        # files of a submission are only needed for scoring again
        connection.execute("UPDATE rollouts SET submission = json_set(submission, '$.files', json('{}'))")
        connection.execute("DELETE FROM backup_files")
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("VACUUM")


if __name__ == "__main__":
    main()
