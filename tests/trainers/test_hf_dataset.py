"""The package `datasets` of HF loads folders written by `farm export`."""

from __future__ import annotations

from pathlib import Path

from farm.cli.upkeep.export_rollouts import export
from farm.store.database import Store
from tests.contract.retention.test_pruning import ended_batch
from tests.contract.store.test_store import announce
from tests.services.commands import output_of
from tests.trainers.conftest import Program


def test_exported_folder_is_a_dataset(run: Program, sqlite_store: Store, tmp_path: Path) -> None:
    announce(sqlite_store)
    ended_batch(sqlite_store, n=3, n_samples=2, age_s=0.0)
    folder = tmp_path / "exported"
    output_of(export, str(folder), "--url", sqlite_store.url)
    facts = run("load_dataset", folder, tmp_path / "cache")
    assert facts["n"] == 6
    assert facts["rewards"] == [0.5] * 6
    assert facts["roles"]
    assert facts["lengths"] == [1, 1, 1]
    assert facts["streams"]
