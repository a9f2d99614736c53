"""A process with one connection to Postgres: its leases and heartbeats survive all its other work on that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from sqlalchemy import Connection, select, text

from farm.errors import StoreUnavailable
from farm.ids import RolloutRef
from farm.notifications import Signals
from farm.records.rollout import Stage
from farm.scheduler.dispatcher import ROLE
from farm.store import cancel_and_rescore, leader, leases, nodes, rollouts
from farm.store.database import Store
from farm.store.sql.clock import db_now
from tests.contract.store.test_store import announce, claimed, new_batch, place
from tests.contract.store.test_store_silence import all_rows, idle_transaction, short_timeout_store
from tests.services.farms import until
from workers.process.lease_renewal import Leases


@pytest.fixture
def one(postgres_store: Store) -> Iterator[Store]:
    """Yield the store of a process with one connection, which an urgent write gets after 0.5 s."""
    store = Store(postgres_store.url, n_connections=1, urgent_s=0.5)
    yield store
    store.close()


def test_heartbeat_waits_for_no_lock_of_its_writer(postgres_store: Store) -> None:
    announce(postgres_store)
    batch_id = new_batch(postgres_store)
    place(postgres_store, batch_id)
    held = claimed(postgres_store, f"{batch_id}.0.0", Stage.INIT)
    (node,) = postgres_store.read(nodes.listing)
    # no use is broken here: lock timeouts are shorter
    one, other = (
        Store(postgres_store.url, n_connections=1, urgent_s=60.0),
        short_timeout_store(postgres_store.url, idle_ms=0),
    )
    assert one.write(lambda c: leader.acquire_leadership(c, ROLE, "me", 60.0), urgent=True)
    try:
        with idle_transaction(other, all_rows):
            waiting = [one.submit(lambda c: len(cancel_and_rescore.cancel(c, RolloutRef(batch_id)))) for _ in range(3)]
            assert one.write(lambda c: leases.renew(c, "w", [held.rollout_id], 60.0), urgent=True)
            assert one.write(lambda c: nodes.heartbeat(c, node), urgent=True)
            assert one.write(lambda c: leader.acquire_leadership(c, ROLE, "me", 60.0), urgent=True)
            assert one.read(lambda c: c.execute(text("SELECT 1")).scalar_one()) == 1
            assert not any(each.done() for each in waiting)
        assert sorted(each.result(60) for each in waiting) == [0, 0, 1]
    finally:
        other.close()
        one.close()


class _Once:
    """Work that does not end the first time that it runs."""

    def __init__(self, endless: Callable[[Connection], object]) -> None:
        self.n_times = 0
        self._endless = endless

    def __call__(self, connection: Connection) -> int:
        self.n_times += 1
        if self.n_times == 1:
            self._endless(connection)
        return int(connection.execute(text("SELECT 7")).scalar_one())


def many_statements(connection: Connection) -> None:
    while True:
        connection.execute(text("SELECT pg_sleep(0.05)"))


N_OTHERS = text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND state <> 'idle'"
)
ENDLESS: dict[str, Callable[[Connection], object]] = {
    "a statement": lambda c: c.execute(text("SELECT pg_sleep(600)")),
    "many statements": many_statements,
    "an answer": lambda c: c.execute(text("SELECT repeat('x', 1000) FROM generate_series(1, 100000000)")).all(),
}


@pytest.mark.parametrize("endless", ENDLESS)
@pytest.mark.parametrize("reading", [False, True], ids=["write", "read"])
def test_endless_work_yields_to_an_urgent_write_and_is_retried(one: Store, endless: str, reading: bool) -> None:
    work, answers = _Once(ENDLESS[endless]), list[int]()
    thread = threading.Thread(target=lambda: answers.append((one.read if reading else one.write)(work)))
    thread.start()
    until(lambda: work.n_times, "it has begun")
    assert one.write(lambda c: c.execute(text("SELECT 5")).scalar_one(), urgent=True) == 5
    thread.join(600)
    assert (answers, work.n_times) == ([7], 2)
    # the server ends the session of an aborted client after a moment
    until(lambda: not one.read(lambda c: c.execute(N_OTHERS).scalar_one()), "the server has ended the first attempt")


class Busy:
    """A transaction that holds the connection until it is ended."""

    def __init__(self, store: Store) -> None:
        self._begun, self._free = threading.Event(), threading.Event()
        self._writing = store.submit(self._wait)
        assert self._begun.wait(600)

    def end(self) -> None:
        self._free.set()
        self._writing.result(60)

    def _wait(self, _: Connection) -> None:
        self._begun.set()
        self._free.wait(600)


def test_endless_write_in_a_group_affects_no_other_write(one: Store) -> None:
    busy = Busy(one)
    work = _Once(ENDLESS["a statement"])
    written = [one.submit(lambda c: 1), one.submit(work), one.submit(lambda c: 3)]
    busy.end()
    until(lambda: work.n_times, "it has begun")
    assert one.write(lambda c: True, urgent=True)
    assert [each.result(60) for each in written] == [1, 7, 3]


def test_single_read_fails_fast_on_a_busy_connection(one: Store) -> None:
    busy = Busy(one)
    with pytest.raises(StoreUnavailable, match="used its connection for something else"):
        one.read(lambda c: c.execute(text("SELECT 1")).scalar_one(), patience_s=0.0)
    busy.end()
    assert one.read(lambda c: c.execute(text("SELECT 1")).scalar_one(), patience_s=0.0) == 1


def wait_in_statements(store: Store, ended: threading.Event, _: str) -> None:
    """Keep the writer in statements that take longer than the lease."""
    while not ended.is_set():
        with suppress(StoreUnavailable):
            store.write(lambda c: c.execute(text("SELECT pg_sleep(:s)"), {"s": 0 if ended.is_set() else 9}))


def wait_for_locks(store: Store, ended: threading.Event, batch_id: str) -> None:
    """Keep the writer waiting for rows of a silent session."""
    other = short_timeout_store(store.url, idle_ms=0)
    with ExitStack() as stack:
        stack.callback(other.close)
        stack.enter_context(
            idle_transaction(other, lambda c: c.execute(text("SELECT * FROM batches FOR UPDATE")).all())
        )
        waiting = [store.submit(lambda c: cancel_and_rescore.cancel(c, RolloutRef(batch_id))) for _ in range(3)]
        ended.wait(600)
        assert not any(each.done() for each in waiting)


def read_without_end(store: Store, ended: threading.Event, _: str) -> None:
    """Keep the connection in consecutive reads that take as long as a lease together."""
    readers = [
        threading.Thread(target=lambda: store.read(lambda c: c.execute(text("SELECT pg_sleep(1)")).all()))
        for _ in range(8)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(600)
    ended.wait(600)


@pytest.mark.parametrize("busy_with", [wait_in_statements, wait_for_locks, read_without_end])
def test_worker_with_a_busy_connection_keeps_its_leases(
    postgres_store: Store, busy_with: Callable[[Store, threading.Event, str], None]
) -> None:
    lease_s = 6.0
    store = Store(postgres_store.url, n_connections=1, urgent_s=lease_s / 3)
    batch_id, other_id = new_batch(store), new_batch(store)
    place(store, batch_id)
    claim = claimed(store, f"{batch_id}.0.0", Stage.INIT, lease_s=lease_s)
    ended = threading.Event()
    busy = threading.Thread(target=busy_with, args=(store, ended, other_id))

    def left() -> tuple[float, float]:
        row = select(rollouts.rollouts.c.lease_expires_at, db_now()).where(
            rollouts.rollouts.c.rollout_id == claim.rollout_id
        )
        return postgres_store.read(lambda c: c.execute(row).one()._tuple())

    first, _ = left()
    held_by = Leases(store, Signals(""), "w", lease_s, 60.0)
    deadline = time.monotonic() + 60
    try:
        with held_by.hold(claim) as held:
            busy.start()
            expires_at, now = left()
            while expires_at < first + 0.6 * lease_s and time.monotonic() < deadline:
                assert now < expires_at, "the lease has run out"
                assert not held.reason
                time.sleep(0.1)
                expires_at, now = left()
    finally:
        ended.set()
        held_by.close()
        busy.join(600)
        store.close()
    assert expires_at >= first + 0.6 * lease_s, "it was renewed twice"
