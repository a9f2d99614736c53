"""A process or server that goes silent in the middle of a transaction blocks others only for a short time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event, select, text
from sqlalchemy.engine import make_url

from farm import metrics
from farm.cli import doctor
from farm.errors import StoreGone, StoreUnavailable
from farm.ids import RolloutRef
from farm.notifications import Signals
from farm.records.rollout import Stage
from farm.scheduler.dispatcher import ROLE, Dispatcher
from farm.settings import Settings
from farm.store import cancel_and_rescore, leader, leases, migrations, nodes, rollouts
from farm.store.database import Store
from farm.store.rollouts import RunSummary
from farm.store.sql.database_sessions import SESSION, SqliteFile
from testkit.postgres import RestartablePostgres, restartable_postgres
from tests.contract.store.test_store import NODE, announce, claim, claimed, new_batch, place, status
from tests.services.farms import until

SUMMARY = RunSummary("submitted", {}, n_turns=1, n_response_tokens=1)


def short_timeout_store(url: str, idle_ms: int = 1500, lock_ms: int = 500, **options: Any) -> Store:
    """Return a store whose sessions are ended sooner than usual."""
    own = f"-c idle_in_transaction_session_timeout={idle_ms} -c lock_timeout={lock_ms}"
    return Store(make_url(url).update_query_dict({"options": own}).render_as_string(hide_password=False), **options)


@contextmanager
def idle_transaction(store: Store, hold: Callable[[Connection], Any]) -> Iterator[None]:
    """Hold a lock in a session that then goes silent."""
    connection = store.engine.connect()
    try:
        hold(connection)
        yield
    finally:
        connection.invalidate()
        connection.close()


def all_rows(connection: Connection) -> None:
    for table in ("batches", "rollouts", "nodes", "leaders"):
        connection.execute(text(f"SELECT * FROM {table} FOR UPDATE")).all()


def test_every_session_has_timeouts(postgres_store: Store) -> None:
    result = postgres_store.read(
        lambda c: {name: c.execute(text(f"SHOW {name}")).scalar_one() for name in SESSION if "tcp" not in name}
    )
    assert result == {name: value for name, value in SESSION.items() if "tcp" not in name}
    own = short_timeout_store(postgres_store.url, lock_ms=123)
    assert own.read(lambda c: c.execute(text("SHOW lock_timeout")).scalar_one()) == "123ms"
    own.close()


def test_heartbeat_waits_for_no_lock(postgres_store: Store) -> None:
    store = postgres_store
    announce(store)
    batch_id = new_batch(store)
    place(store, batch_id)
    held = claimed(store, f"{batch_id}.0.0", Stage.INIT)
    assert store.write(lambda c: leader.acquire_leadership(c, ROLE, "me", 60.0), urgent=True)
    (node,) = store.read(nodes.listing)
    other = short_timeout_store(store.url, idle_ms=0)
    try:
        with idle_transaction(other, all_rows):
            # the writer of this process waits, and none of these does
            waiting = store.submit(lambda c: leases.expire_owner(c, "nobody") + interventions_of(c, batch_id))
            assert store.write(lambda c: leases.renew(c, "w", [held.rollout_id], 60.0), urgent=True) == {
                held.rollout_id
            }
            assert store.write(lambda c: nodes.heartbeat(c, node), urgent=True)
            assert store.write(lambda c: leader.acquire_leadership(c, ROLE, "me", 60.0), urgent=True)
            assert not store.write(lambda c: leader.acquire_leadership(c, ROLE, "another", 60.0), urgent=True)
            assert not waiting.done()
        assert waiting.result(60) == 1
    finally:
        other.close()


def interventions_of(connection: Connection, batch_id: str) -> int:
    return len(cancel_and_rescore.cancel(connection, RolloutRef(batch_id)))


def test_session_idle_in_a_transaction_is_ended(postgres_store: Store, caplog: pytest.LogCaptureFixture) -> None:
    batch_id = new_batch(postgres_store)
    frozen, other = short_timeout_store(postgres_store.url, idle_ms=3000), short_timeout_store(postgres_store.url)
    try:
        with idle_transaction(frozen, all_rows):
            result = other.write(lambda c: cancel_and_rescore.cancel(c, RolloutRef(batch_id)))
            assert result == [f"{batch_id}.0.0"]
        [alarm] = [record.message for record in caplog.records if record.levelname == "ERROR"]
        assert alarm.startswith("ALARM Lock in the database not acquired within")
        assert "idle in transaction" in alarm
    finally:
        frozen.close()
        other.close()


def test_session_idle_in_a_transaction_is_counted_and_reported(postgres_store: Store) -> None:
    def n_silent() -> float | None:
        return metrics.registry(postgres_store, 60.0).get_sample_value("farm_silent_transactions")

    frozen = short_timeout_store(postgres_store.url, idle_ms=0)
    try:
        assert (n_silent(), doctor._transactions(postgres_store.url).ok) == (0, True)
        with idle_transaction(frozen, all_rows):
            until(lambda: n_silent() == 1, "it is counted")
            finding = doctor._transactions(postgres_store.url)
            assert not finding.ok
            assert "idle in transaction for" in finding.detail
            assert "pg_terminate_backend" in finding.remedy
    finally:
        frozen.close()


@pytest.fixture(scope="module")
def restartable_server() -> Iterator[RestartablePostgres]:
    with restartable_postgres() as server:
        yield server


def test_frozen_server_raises_store_unavailable(restartable_server: RestartablePostgres) -> None:
    store = Store(f"{restartable_server.url}&connect_timeout=2", patience_s=2.0)
    assert store.read(lambda c: c.execute(text("SELECT 1")).scalar_one()) == 1
    assert store.write(lambda c: c.execute(text("SELECT 2")).scalar_one()) == 2
    pids = _processes_of(restartable_server)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        written = store.submit(lambda c: c.execute(text("SELECT 3")).scalar_one())
        with pytest.raises(StoreUnavailable, match="does not answer"):
            store.read(lambda c: c.execute(text("SELECT 4")).scalar_one())
        assert isinstance(written.exception(60), StoreUnavailable)
    finally:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
    patient = Store(restartable_server.url)
    assert patient.write(lambda c: c.execute(text("SELECT 5")).scalar_one()) == 5
    patient.close()
    store.close()


def test_slow_statement_is_waited_for(restartable_server: RestartablePostgres) -> None:
    store = Store(restartable_server.url, patience_s=1.0)
    assert store.read(lambda c: c.execute(text("SELECT 7 FROM pg_sleep(4)")).scalar_one()) == 7
    store.close()


def _processes_of(server: RestartablePostgres) -> list[int]:
    """Return the server's process, then its children."""
    assert server._process is not None
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields.rpartition(")")[2].split()[1])
    return [server._process.pid, *(pid for pid, parent in parents.items() if parent == server._process.pid)]


class TestManyFinishes:
    def test_finishes_of_several_batches_never_deadlock(self, postgres_store: Store) -> None:
        stores = [Store(postgres_store.url) for _ in range(3)]
        ids = [new_batch(postgres_store, 8, 3) for _ in range(4)]
        held = []
        for batch_id in ids:
            place(postgres_store, batch_id)
            for group in range(8):
                for sample in range(3):
                    rollout_id = f"{batch_id}.{group}.{sample}"
                    postgres_store.write(lambda c, rollout_id=rollout_id: _to_the_end(c, rollout_id))  # type: ignore[misc]
                    held.append(claimed(postgres_store, rollout_id, Stage.EVAL))
        # as the dispatcher's rounds mix them, and in reverse
        mixed = sorted(held, key=lambda each: (each.sample_index, each.group_index, each.batch_id))
        order = [mixed[0::3], mixed[1::3][::-1], mixed[2::3]]
        start = threading.Barrier(3)

        def finish_all(number: int) -> int:
            start.wait()
            done = [
                stores[number].submit(
                    lambda c, each=each: rollouts.finish(c, each, 1.0, {}, "t"),  # type: ignore[misc]
                    batch_id=each.batch_id,
                    rollout_id=each.rollout_id,
                )
                for each in order[number]
            ]
            return sum(each.result(60) for each in done)

        with ThreadPoolExecutor(3) as threads:
            assert sum(threads.map(finish_all, range(3))) == len(held)
        deadlocks = text("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        for store in stores:
            store.close()
        postgres_store.read(lambda c: c.execute(text("SELECT pg_stat_clear_snapshot()")).all())
        assert postgres_store.read(lambda c: c.execute(deadlocks).scalar_one()) == 0
        assert [status(postgres_store, batch_id).n_completed for batch_id in ids] == [24] * 4

    def test_finishes_are_written_separately_and_answered_in_order(self, store: Store) -> None:
        free, busy = threading.Event(), threading.Event()

        def wait(_: Connection) -> None:
            busy.set()
            free.wait(600)

        store.submit(wait)
        assert busy.wait(600)
        ran: list[str] = []
        result = [
            store.submit(lambda _, name=name: ran.append(name) or name, rollout_id=name)  # type: ignore[misc, func-returns-value]
            for name in ("b1.2.0", "", "b1.0.0", "b0.9.9")
        ]
        free.set()
        assert [each.result(60) for each in result] == ["b1.2.0", "", "b1.0.0", "b0.9.9"]
        assert ran == ["", "b0.9.9", "b1.0.0", "b1.2.0"]


def _to_the_end(connection: Connection, rollout_id: str) -> None:
    for stage, result in ((Stage.INIT, None), (Stage.RUN, SUMMARY)):
        held = rollouts.claim(connection, rollout_id, 1, stage, NODE, "w", 60.0)
        assert held is not None
        assert rollouts.advance(connection, held, 3.0, result)


def test_standby_dispatcher_writes_nothing(store: Store) -> None:
    announce(store)
    assert store.write(lambda c: leader.acquire_leadership(c, ROLE, "leader", 10.0))
    result: list[str] = []
    event.listen(store.engine, "before_cursor_execute", lambda *call: result.append(call[2]))
    options = Settings(audit_s=0.0, tick_s=0.001, broker_url="memory://")
    dispatcher = Dispatcher(store, Signals(""), options, "standby")
    thread = threading.Thread(target=dispatcher.run)
    thread.start()

    try:
        until(lambda: len(result) >= 2, "it has looked twice")
    finally:
        dispatcher.stop()
        thread.join(600)

    assert not [each for each in result if each.startswith(("UPDATE", "INSERT", "DELETE", "BEGIN IMMEDIATE"))]
    assert len(result) < 10


class TestSqliteFile:
    """Tests of a SQLite store."""

    @pytest.mark.parametrize("replaced", [False, True])
    def test_removed_file_is_reported_and_not_created_again(
        self, sqlite_store: Store, tmp_path: Path, replaced: bool
    ) -> None:
        batch_id = new_batch(sqlite_store)
        path = tmp_path / "farm.db"
        kept = path.read_bytes()
        for each in tmp_path.glob("farm.db*"):
            each.unlink()
        if replaced:
            path.write_bytes(kept)
        for ask in (
            lambda: status(sqlite_store, batch_id),
            lambda: new_batch(sqlite_store),
            lambda: sqlite_store.write(lambda c: None, urgent=True),
        ):
            with pytest.raises(StoreGone, match=r"was (replaced by another|removed) while it was in use"):
                ask()
        assert path.exists() == replaced

    def test_missing_file_is_not_created_by_a_check(self, tmp_path: Path) -> None:
        path = tmp_path / "no" / "farm.db"
        store = Store(f"sqlite:///{path}")
        with pytest.raises(StoreUnavailable, match="farm migrate"):
            migrations.check(store)
        store.close()
        assert not path.exists()

    def test_lock_holder_is_named(self, sqlite_store: Store, tmp_path: Path) -> None:
        path = tmp_path / "farm.db"
        new_batch(sqlite_store)
        file = SqliteFile(str(path))
        assert file.holder() == ""
        program = (
            "import sqlite3, sys, time; c = sqlite3.connect(sys.argv[1], isolation_level=None); "
            "c.execute('BEGIN IMMEDIATE'); print('held', flush=True); time.sleep(600)"
        )
        with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"held\n"
            os.kill(other.pid, signal.SIGSTOP)
            try:
                until(lambda: "stopped" in file.holder(), "it is stopped")
                assert f"process {other.pid} (" in str(file.locked(20.0))
                assert "locked" in str(file.locked(20.0))
                # readers are not blocked
                assert sqlite_store.read(lambda c: c.execute(select(1)).scalar_one()) == 1
            finally:
                other.kill()
        assert claim(sqlite_store, "b0.0.0", Stage.INIT) is None
