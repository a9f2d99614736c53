"""Task archives in a store: complete or not, kept for their batches, dropped after them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from sqlalchemy import delete

from farm.client.local import LocalFarm
from farm.client.verb_groups import PART_BYTES
from farm.errors import InvalidRequest
from farm.notifications import Signals
from farm.records.request import BatchRequest, Instance
from farm.store import batches
from farm.store.blobs import stored_archives
from farm.store.database import Store
from farm.store.sql.schema import Batch
from farm.task_archive import pack
from tests.secret_keys import key_of


def test_archive_is_complete_once_checked_and_removed_with_its_batches(store: Store, tmp_path: Path) -> None:
    task = tmp_path / "task"
    task.mkdir()
    (task / "large").write_bytes(bytes(range(256)) * (PART_BYTES // 200))
    archive = io.BytesIO()
    digest, data = pack(task, archive), archive.getvalue()
    farm = LocalFarm(store, Signals(""), 1000)
    request = BatchRequest(instances=(Instance(data_source="noop", fields={}, archive=digest),))
    farm.put_archive_part(digest, 1, data[PART_BYTES:])
    farm.put_archive_part(digest, 1, data[PART_BYTES:])
    assert (farm.archive_state(digest).whole, farm.archive_state(digest).parts) == (False, (1,))
    with pytest.raises(InvalidRequest, match="no task archive"):
        store.write(lambda connection: batches.create(connection, request, "f", key_of(store)))
    assert farm.upload_archive(task) == digest
    assert farm.archive_state(digest).whole
    batch_id, _ = store.write(lambda connection: batches.create(connection, request, "f", key_of(store)))
    assert store.read(lambda connection: batches.instance_fields(connection, batch_id, 0)) == ("noop", {}, digest)
    assert store.write(lambda connection: stored_archives.sweep(connection, 0.0)) == []
    store.write(lambda connection: connection.execute(delete(Batch).where(Batch.batch_id == batch_id)))
    assert store.write(lambda connection: stored_archives.sweep(connection, 3600.0)) == []
    assert store.write(lambda connection: stored_archives.sweep(connection, 0.0)) == [digest]
    assert store.read(lambda connection: stored_archives.part(connection, digest, 0)) is None


def test_invalid_parts_are_dropped(store: Store, tmp_path: Path) -> None:
    farm = LocalFarm(store, Signals(""), 1000)
    (tmp_path / "task").mkdir()
    archive = io.BytesIO()
    pack(tmp_path / "task", archive)
    for data, reason in ((archive.getvalue(), "are not the archive"), (b"rubbish" * 500, "not a tar")):
        farm.put_archive_part("0" * 64, 0, data)
        with pytest.raises(InvalidRequest, match=reason):
            farm.complete_archive("0" * 64, 1)
        assert farm.archive_state("0" * 64).parts == ()
    for digest, number, data in (("../x", 0, b"x"), ("0" * 64, -1, b"x"), ("0" * 64, 0, bytes(PART_BYTES + 1))):
        with pytest.raises(InvalidRequest):
            farm.put_archive_part(digest, number, data)
