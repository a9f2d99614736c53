"""Backups of every kind of database and restores to every kind: the same rows, all or none, even if killed."""

from __future__ import annotations

import dataclasses
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Table, func, select, update

import farm
from farm.cli.upkeep.stored_data import backup, restore
from farm.client.local import LocalFarm
from farm.errors import Conflict, FarmError, InvalidRequest, NotAllowed, StoreUnavailable
from farm.notifications import Signals
from farm.records.rollout import Stage
from farm.store import epoch
from farm.store.backups import backup as backups
from farm.store.backups.backup import TABLES, BackupFile, read_backup
from farm.store.database import Store
from farm.store.nodes import nodes
from farm.store.rollouts import batches, rollouts
from farm.store.sql.clock import db_now
from testkit.deadline import LONG_S
from tests.contract.retention.test_pruning import ended_batch
from tests.contract.store.test_store import announce, claimed, new_batch, place
from tests.secret_keys import key_of
from tests.services.commands import output_of
from tests.services.farms import NOOP, embedded, farm_folder

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "rubbish": lambda whole: b"rubbish" * 100,
    "empty": lambda whole: b"",
    "cut off": lambda whole: whole[: len(whole) // 2],
    "a page of zeros": lambda whole: whole[:8192] + bytes(4096) + whole[12288:],
}


CHANGED = {"last_seq", "heartbeat_at", "lease_expires_at", "expires_at"}


def age_heartbeats(store: Store) -> None:
    """Age the heartbeats of all nodes by a day."""
    store.write(lambda connection: connection.execute(update(nodes).values(heartbeat_at=db_now() - 86_400)))


@pytest.fixture
def used_store(store: Store) -> Store:
    """Return a store with ended batches, an open one, and a secret."""
    announce(store)
    ended_batch(store, n=3, n_samples=2)
    open_id = new_batch(store, 2, idempotency_key="mine")
    place(store, open_id)
    claimed(store, f"{open_id}.0.0", Stage.INIT)
    age_heartbeats(store)
    return store


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    """Yield a database that does not exist yet."""
    folder = tmp_path / "other"
    folder.mkdir()
    store = Store(f"sqlite:///{folder}/farm.db")
    yield store
    store.close()


def contents(store: Store) -> dict[str, list[Any]]:
    """Return all rows, as text, without what a restore changes: heartbeats and leases."""

    def rows(table: Table) -> list[str]:
        columns = [each for each in table.columns if each.name not in CHANGED]
        return sorted(str(tuple(row)) for row in store.read(lambda connection: connection.execute(select(*columns))))

    return {table.name: rows(table) for table in TABLES if table.name != "epochs"}


def test_backup_is_restored_into_the_same_and_another_database(used_store: Store, other: Store, tmp_path: Path) -> None:
    before, was = contents(used_store), used_store.read(epoch.current)
    made = backups.back_up(used_store, key_of(used_store), tmp_path / "kept")
    assert (made.n_batches, made.n_rollouts) == (2, 8)
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o600
    backups.restore(other, key_of(other), read_backup(tmp_path / "kept"), 60.0)
    assert contents(other) == before
    new_batch(used_store, 5)
    backups.restore(used_store, key_of(used_store), made, 60.0, replace=True)
    assert contents(used_store) == before
    now = used_store.read(epoch.current)
    assert now.epoch != was.epoch, "whoever saw more learns of it"
    last = dict(
        used_store.read(lambda connection: connection.execute(select(batches.c.n_rollouts, batches.c.last_seq)).all())
    )
    assert last[2] > 1000, "numbers that were given to somebody are not given again"
    assert [each.name for each in tmp_path.glob(".kept*")] == []


def test_backup_is_consistent_while_others_write(store: Store, tmp_path: Path) -> None:
    announce(store)
    n_before, stop = 20, threading.Event()
    for _ in range(n_before):
        new_batch(store, 3)
    last: list[str] = []

    def submit() -> None:
        while not stop.is_set():
            last.append(new_batch(store, 3))

    writer = threading.Thread(target=submit)
    writer.start()
    n_seen: list[int] = []

    def check() -> None:
        # the copy continues after another process has written
        n = len(last)
        while len(last) == n and writer.is_alive():
            stop.wait(0.001)
        n_seen.append(len(last))

    try:
        made = backups.back_up(store, key_of(store), tmp_path / "kept", check)
    finally:
        stop.set()
        writer.join(LONG_S)
    assert n_seen, "it is asked"
    assert made.n_rollouts == 3 * made.n_batches
    assert made.n_batches >= n_before
    assert made.n_batches < n_before + len(last), "what was submitted meanwhile is not in it"


def refused(store: Store, made: BackupFile, error: type[FarmError], text: str) -> None:
    before = contents(store)
    with pytest.raises(error, match=text):
        backups.restore(store, key_of(store), made, 60.0)
    assert contents(store) == before


def test_restore_overwrites_data_only_with_replace(used_store: Store, other: Store, tmp_path: Path) -> None:
    made = backups.back_up(used_store, key_of(used_store), tmp_path / "kept")
    refused(used_store, made, Conflict, "has 2 batches and is not empty")
    announce(used_store)
    for replace in (False, True):
        with pytest.raises(Conflict, match="node n1 sent a heartbeat within"):
            backups.restore(used_store, key_of(used_store), made, 60.0, replace)
    other.write(lambda connection: None) if other.is_there else None
    backups.restore(other, key_of(other), made, 60.0)
    refused(other, made, Conflict, "--replace removes all")


class Torn(BackupFile):
    """A backup that cannot be read to its end."""

    def rows(self, table: Table) -> Iterator[list[tuple[object, ...]]]:
        if table is TABLES[-1]:
            raise OSError("the disk is gone")
        yield from super().rows(table)


def test_failed_restore_leaves_the_store_unchanged(used_store: Store, other: Store, tmp_path: Path) -> None:
    sealed = used_store.write(lambda connection: key_of(used_store).seal(connection, "word"))
    made = backups.back_up(used_store, key_of(used_store), tmp_path / "kept")
    torn = Torn(**{each.name: getattr(made, each.name) for each in dataclasses.fields(made)})
    before = contents(used_store)
    with pytest.raises(OSError, match="the disk is gone"):
        backups.restore(used_store, key_of(used_store), torn, 60.0, replace=True)
    assert contents(used_store) == before
    with pytest.raises(OSError, match="the disk is gone"):
        backups.restore(other, key_of(other), torn, 60.0)
    key = key_of(other).file
    assert not key.exists()
    key.write_text("another key of another farm")
    with pytest.raises(NotAllowed, match="differs from the backup's secret key"):
        backups.restore(other, key_of(other), made, 60.0)
    with pytest.raises(OSError, match="the disk is gone"):
        backups.restore(other, key_of(other), torn, 60.0, replace=True)
    assert key.read_text() == "another key of another farm"
    assert key in backups.restore(other, key_of(other), made, 60.0, replace=True)
    assert key_of(other).unseal(sealed) == "word"
    assert key.with_name("secret_key.replaced").read_text() == "another key of another farm"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_or_foreign_backup_is_refused(sqlite_store: Store, tmp_path: Path, damage: str) -> None:
    ended_batch(sqlite_store, n=40)
    path = tmp_path / "kept"
    backups.back_up(sqlite_store, key_of(sqlite_store), path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(InvalidRequest, match=r"kept is (not a backup of a farm|damaged)"):
        read_backup(path)


def test_backup_of_another_schema_names_its_version(sqlite_store: Store, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    version = backups.back_up(sqlite_store, key_of(sqlite_store), path).version
    for change, text in (
        ("ALTER TABLE nodes ADD COLUMN more TEXT", "has a table nodes of another form"),
        ("UPDATE alembic_version SET version_num = '9999'", "has schema revision 9999, this farm needs"),
    ):
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(change)
        with pytest.raises(StoreUnavailable, match=text) as caught:
            read_backup(path)
        assert f"the version of the farm that made it ({version})" in str(caught.value)


MAKER = """
import sys, time
from pathlib import Path
from farm.store.backups.backup import back_up
from farm.store.database import Store
from tests.secret_keys import key_of
def check():
    print("in the middle", flush=True)
    time.sleep(3600)
store = Store(sys.argv[1])
back_up(store, key_of(store), Path(sys.argv[2]), check)
"""


def test_killed_backup_keeps_the_previous_one(used_store: Store, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    whole = backups.back_up(used_store, key_of(used_store), path).n_batches
    new_batch(used_store)
    address = used_store.engine.url.render_as_string(hide_password=False)
    maker = subprocess.Popen([sys.executable, "-c", MAKER, address, str(path)], stdout=subprocess.PIPE)
    try:
        assert maker.stdout is not None
        assert maker.stdout.readline() == b"in the middle\n"
        with pytest.raises(Conflict, match="another process is writing"):
            backups.back_up(used_store, key_of(used_store), path)
    finally:
        maker.send_signal(signal.SIGKILL)
        maker.communicate(timeout=LONG_S)
    assert read_backup(path).n_batches == whole
    assert backups.back_up(used_store, key_of(used_store), path).n_batches == whole + 1
    assert sorted(each.name for each in tmp_path.glob(".kept*")) == []


def test_backup_commands_restore_a_farm_that_continues(sqlite_store: Store, tmp_path: Path) -> None:
    announce(sqlite_store)
    batch_id = LocalFarm(sqlite_store, Signals(""), 1000).submit({"instances": [NOOP] * 3, "idempotency_key": "mine"})
    place(sqlite_store, batch_id)
    claimed(sqlite_store, f"{batch_id}.0.0", Stage.INIT)
    file = str(tmp_path / "kept")
    assert "1 batches, 3 rollouts" in output_of(backup, file, "--url", sqlite_store.url)
    database = str(sqlite_store.engine.url.database)
    assert "exists and is not a backup" in output_of(backup, database, "--url", sqlite_store.url, code=1)
    assert "an API makes no backups" in output_of(backup, file, "--url", "http://127.0.0.1:1", code=1)
    assert "an API restores nothing" in output_of(restore, file, "--url", "http://127.0.0.1:1", code=1)
    with farm_folder() as folder:
        home = folder / "home"
        assert "1 batches, 3 rollouts" in output_of(restore, file, "--url", str(home))
        assert "--replace removes all" in output_of(restore, file, "--url", str(home), code=1)
        with embedded(folder) as running, farm.connect(running.store_url, broker_url=running.broker_url) as client:
            again = client.submit({"instances": [NOOP] * 3, "idempotency_key": "mine"})
            assert again == batch_id, "what was submitted is known"
            rewards = [each.reward for each in client.collect(batch_id, timeout_s=600)]
            assert rewards == [1.0] * 3
            attempts = {each.attempt for each in client.rollouts(batch_id) if each.group_index == 0}
            assert attempts == {2}, "rollouts of a worker run again"
    assert sqlite_store.read(lambda connection: connection.execute(select(func.count()).select_from(rollouts))).all()
