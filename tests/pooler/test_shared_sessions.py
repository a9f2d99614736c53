"""Postgres sessions shared by clients: settings apply to one transaction, and a farm runs on a few sessions."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text

import farm
from farm.errors import InvalidRequest
from farm.store.database import Store
from farm.store.nodes import capacity
from farm.store.sql.database_sessions import LOCK_WAIT_S
from tests.contract.store.test_store import new_batch, place, run_to_end, status
from tests.services.farms import NOOP, embedded, farm_folder, until
from tests.services.servers.pgbouncer import N_SESSIONS, through

_LOCK_WAIT = text("SHOW lock_timeout")


def test_settings_apply_to_one_transaction(pooled_url: str) -> None:
    one, other = Store(pooled_url), Store(pooled_url, n_connections=1)
    for _ in range(3):
        assert one.write(lambda c: c.execute(_LOCK_WAIT).scalar_one()) == f"{LOCK_WAIT_S:g}s"
        assert other.write(lambda c: c.execute(_LOCK_WAIT).scalar_one()) == "2s"
        assert one.read(lambda c: c.execute(_LOCK_WAIT).scalar_one()) == "0", "nothing is left in the session"
    assert one.read(capacity) is None
    one.close()
    other.close()


def test_pooler_without_its_setting_is_refused(pooled_url: str, pooler: Path) -> None:
    plain = through(pooler, pooled_url, "sslmode=disable")
    stores = [Store(plain) for _ in range(N_SESSIONS + 1)]

    def ask_all() -> None:
        for store in stores:
            store.read(lambda c: c.execute(text("SELECT 1")).scalar_one())

    with pytest.raises(InvalidRequest, match="pooler=transaction"):
        ask_all()
    for store in stores:
        store.close()
    with pytest.raises(InvalidRequest, match="pooler=statement"):
        Store(through(pooler, pooled_url, "pooler=statement"))


def test_many_clients_run_concurrently(pooled_url: str) -> None:
    stores = [Store(pooled_url, n_connections=1) for _ in range(16)]
    batch_id = new_batch(stores[0], len(stores) * 4)
    place(stores[0], batch_id)

    def some(number: int) -> None:
        for turn in range(4):
            run_to_end(stores[number], f"{batch_id}.{number * 4 + turn}.0")

    with ThreadPoolExecutor(len(stores)) as threads:
        list(threads.map(some, range(len(stores))))
    assert status(stores[0], batch_id).n_completed == len(stores) * 4
    for store in stores:
        store.close()


def test_client_that_is_idle_in_a_transaction_is_ended(pooled_url: str) -> None:
    silent, other = Store(pooled_url), Store(pooled_url)
    batch_id = new_batch(other, 1)
    begun, ended = threading.Event(), threading.Event()

    def hold(connection: object) -> None:
        connection.execute(text("SELECT * FROM batches FOR UPDATE"))  # type: ignore[attr-defined]
        if not begun.is_set():
            begun.set()
            ended.wait(300)

    writing = silent.submit(hold)
    assert begun.wait(60)
    place(other, batch_id)
    run_to_end(other, f"{batch_id}.0.0")
    assert status(other, batch_id).n_completed == 1, "the wait for its lock was limited"
    ended.set()
    writing.result(60)
    silent.close()
    other.close()


def test_farm_runs_on_few_sessions(pooled_url: str) -> None:
    with (
        farm_folder() as folder,
        embedded(folder, pooled_url) as here,
        farm.connect(here.store_url, broker_url=here.broker_url) as client,
    ):
        batch_id = client.submit({"instances": [NOOP] * 100})
        with psycopg.connect(pooled_url.replace("+psycopg", "").partition("&pooler")[0], autocommit=True) as line:
            line.prepare_threshold = None
            of_farm = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid IS NOT NULL"
            most = 0

            def looked() -> bool:
                nonlocal most
                most = max(most, int(line.execute(of_farm).fetchone()[0]))  # type: ignore[index]
                return client.status(batch_id).n_completed == 100

            until(looked, "all have ended")
    assert 0 < most <= N_SESSIONS
