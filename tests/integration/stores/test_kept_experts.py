"""Stored experts: they limit the pages of a stream, and a backup contains them."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.store.backups.backup import back_up, read_backup, restore
from farm.store.blobs import stored_experts
from farm.store.database import Store
from tests.contract.retention.test_pruning import ended_batch, farm_of, rows
from tests.secret_keys import key_of


@pytest.mark.parametrize(("n_bytes", "sizes"), [(1, [1] * 6), (10**9, [6])])
def test_page_size_is_limited_by_the_bytes_of_experts(
    store: Store, monkeypatch: pytest.MonkeyPatch, n_bytes: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(stored_experts, "PAGE_BYTES", n_bytes)
    batch_id = ended_batch(store, n=3, n_samples=2)
    farm, cursor, found = farm_of(store), 0, []
    while page := farm.page(batch_id, cursor).rollouts:
        found.append(len(page))
        cursor = max(rollout.cursor for rollout in page)
        assert all(row.routed_experts is not None for rollout in page for row in rollout.segments)
    assert found == sizes


def test_page_of_groups_has_complete_groups(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_experts, "PAGE_BYTES", 1)
    batch_id = ended_batch(store, n=3, n_samples=2)
    farm, cursor, found = farm_of(store), 0, []
    while page := farm.page(batch_id, cursor, whole_groups=True).rollouts:
        found.append([rollout.rollout_id for rollout in page])
        cursor = max(rollout.cursor for rollout in page)
    assert sorted(found) == [[f"{batch_id}.{group}.{sample}" for sample in range(2)] for group in range(3)]
    assert len(list(farm.stream(batch_id))) == 6


def test_backup_contains_experts(store: Store, tmp_path: Path) -> None:
    batch_id = ended_batch(store, n=5)
    before = rows(store, batch_id)
    assert before["call_experts"] == 10
    back_up(store, key_of(store), tmp_path / "backup.db")
    restore(store, key_of(store), read_backup(tmp_path / "backup.db"), 60.0, replace=True)
    assert rows(store, batch_id) == before
    [(row, *_), *_] = [rollout.segments for rollout in farm_of(store).collect(batch_id)]
    assert row.routed_experts is not None
    assert row.routed_experts.known.tolist() == [1, 1, 0]
