"""Stores that fail under running farms: finished stages are not repeated, and every rollout ends once."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection

import farm
from farm.embedded.embedded_farm import Embedded
from farm.errors import StoreUnavailable
from farm.store.database import Store
from farm.store.reports import audit
from testkit.postgres import RestartablePostgres, restartable_postgres
from testkit.private_server import Missing
from tests.acceptance.faults.test_kill import every_rollout_ended_once, worker_pid
from tests.conftest import absent
from tests.services.farms import embedded, farm_folder, left_of, until

SLOW = {"data_source": "noop", "fields": {"seconds": 1.5}}
SHORT = {"FARM_LEASE_S": "3", "FARM_NODE_TIMEOUT_S": "4"}


@pytest.fixture
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[RestartablePostgres]:
    """Yield a Postgres that keeps committed data, whatever happens to it."""
    try:
        with restartable_postgres() as made:
            yield made
    except Missing as missing:
        absent(str(missing))


@pytest.fixture(scope="module")
def here(server: RestartablePostgres) -> Iterator[Embedded]:
    """Yield a farm on that Postgres, shared by the tests that lose no worker."""
    with farm_folder() as folder:
        with embedded(folder, database(server, "shared"), False, **SHORT) as started:
            yield started
        assert left_of(folder) == []


@contextmanager
def running_batch(here: Embedded) -> Iterator[tuple[farm.Farm, str]]:
    """Yield a batch of a farm that is running; afterwards every rollout has ended, and was run once."""
    with farm.connect(here.home) as client:
        batch_id = client.submit({"instances": [SLOW] * 60})
        until(lambda: client.status(batch_id).n_finished >= 4, "some have ended")
        until(lambda: client.status(batch_id).stages[farm.Stage.RUN][farm.State.ACTIVE] >= 4, "others run")
        yield client, batch_id
        every_rollout_ended_once(client, batch_id)
        rollouts = client.rollouts(batch_id)
        again = {rollout.rollout_id: client.timings(rollout.rollout_id) for rollout in rollouts if rollout.attempt > 1}
        assert not again, f"{Counter(str(rollout.failure) for rollout in rollouts)} {again}"
        store = Store(here.store_url)
        assert store.read(lambda connection: audit.violations(connection, batch_id)) == []
        store.close()


def test_batch_survives_a_postgres_outage_longer_than_a_lease(here: Embedded, server: RestartablePostgres) -> None:
    with running_batch(here):
        server.cut_down()
        until_s = time.monotonic() + 7.0
        until(lambda: time.monotonic() > until_s, "a lease and a node's silence would have run out")
        server.start()


def test_rollouts_of_worker_killed_during_outage_are_retried(folder: Path, server: RestartablePostgres) -> None:
    # nothing expires by itself
    patient = {"FARM_LEASE_S": "600", "FARM_NODE_TIMEOUT_S": "600"}
    with embedded(folder, database(server, "bereft"), False, **patient) as here, farm.connect(here.home) as client:
        batch_id = client.submit({"instances": [SLOW] * 60, "max_attempts": 1})
        until(lambda: client.status(batch_id).stages[farm.Stage.RUN][farm.State.ACTIVE] >= 4, "some run", 120)
        server.cut_down()
        os.kill(worker_pid(here, "run"), signal.SIGKILL)
        until(lambda: "are released when" in (here.logs / "node.log").read_text(), "it could not be said", 120)
        server.start()
        every_rollout_ended_once(client, batch_id)
        assert any(rollout.attempt > 1 for rollout in client.rollouts(batch_id))
    assert left_of(folder) == []


def test_batch_survives_terminated_store_connections(here: Embedded, server: RestartablePostgres) -> None:
    with running_batch(here) as (client, batch_id):
        others = Store(server.url)
        end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = 'shared'"
        n_ended = 0
        for n_finished in range(6, 42, 4):
            until(lambda n=n_finished: client.status(batch_id).n_finished >= n, f"{n_finished} have ended")  # type: ignore[misc]
            n_ended += int(others.read(lambda connection: connection.exec_driver_sql(end).scalar()) or 0)
        others.close()
        assert n_ended > 20


def test_batch_survives_a_table_lock_by_a_migration(here: Embedded) -> None:
    with running_batch(here):
        other_store = Store(here.store_url)

        def migrate(connection: Connection) -> None:
            operations = Operations(MigrationContext.configure(connection))
            operations.add_column("rollouts", sa.Column("of_a_later_farm", sa.Integer, server_default="0"))
            operations.create_index("ix_of_a_later_farm", "rollouts", ["of_a_later_farm", "state"])
            # longer than a lease, as with many millions of rows
            operations.execute("SELECT pg_sleep(5)")

        other_store.write(migrate)
        other_store.close()


def test_batch_survives_a_full_disk_under_sqlite(folder: Path) -> None:
    url = f"sqlite:///{folder / 'disk' / 'farm.db'}"
    with (
        small_disk(folder / "disk") as disk,
        embedded(folder, url, False, **SHORT) as small,
        running_batch(small) as (client, batch_id),
    ):
        store = Store(url, patience_s=7.0)
        fill(disk / "filler")
        n_active = client.status(batch_id).stages[farm.Stage.RUN][farm.State.ACTIVE]
        with pytest.raises(StoreUnavailable, match="full"):
            # for longer than a lease
            store.write(lambda connection: connection.exec_driver_sql("CREATE TABLE more AS SELECT zeroblob(4000000)"))
        store.close()
        assert client.status(batch_id).stages[farm.Stage.RUN][farm.State.ACTIVE] == n_active > 0, (
            "nothing can be written"
        )
        (disk / "filler").unlink()


def database(server: RestartablePostgres, name: str) -> str:
    """Return the URL of a new database there."""
    store = Store(server.url)
    with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    store.close()
    return server.url.replace("/postgres?", f"/{name}?")


def fill(path: Path) -> None:
    """Write until there is no space left."""
    with path.open("wb", buffering=0) as file:
        for n_bytes in (65536, 4096, 1):
            try:
                while file.write(bytes(n_bytes)):
                    pass
            except OSError:
                continue


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Yield a file system of some megabytes, more than a write-ahead log takes."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"this user may make no small file system: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
