"""A Postgres whose connections break: in the middle of a commit, for a while, or at every query of one kind."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select, update

from farm.client.local import LocalFarm
from farm.errors import StoreUnavailable
from farm.notifications import Signals
from farm.records.request import BatchRequest, Instance
from farm.records.rollout import Stage, State
from farm.scheduler.dispatcher import Dispatcher
from farm.settings import Settings
from farm.store import batches, leases, rollouts, trajectories
from farm.store.blobs import artefacts
from farm.store.database import Store
from farm.store.rollouts import Claim
from farm.store.sql.clock import db_now
from tests.contract.store.test_store import NODE, advance, announce, claim, claimed, finish, new_batch, place, status
from tests.integration.stores.test_recorder import sampled
from tests.services.farms import until
from tests.services.servers.postgres_cut import PostgresProxy, between
from tests.services.servers.redis import redis_client
from workers.process.lease_renewal import ClaimedWork, Leases, StopReason
from workers.process.loop import Loop
from workers.process.recorder import AttemptRecorder

RUN_RESULT = {"policy_outcome": "submitted", "submission": {"answer": "42"}}


@pytest.fixture
def database(postgres_store: Store) -> Iterator[PostgresProxy]:
    """Yield a proxy to a database with the farm's tables."""
    with between(postgres_store.url) as stands:
        yield stands


@pytest.fixture
def store(database: PostgresProxy) -> Iterator[Store]:
    """Yield a worker's store."""
    opened = Store(database.url, patience_s=math.inf)
    yield opened
    opened.close()


@pytest.fixture(params=[True, False], ids=["made", "lost"])
def made(request: pytest.FixtureRequest) -> bool:
    """Return whether a commit whose connection was cut was nevertheless made."""
    return bool(request.param)


class BlockedWriter:
    """A store's writer, kept busy while other writes are queued, so that all of them go into one transaction."""

    def __init__(self, store: Store) -> None:
        self._busy, self._free = threading.Event(), threading.Event()
        store.submit(self._wait)
        assert self._busy.wait(600)

    def _wait(self, connection: Connection) -> None:
        self._busy.set()
        self._free.wait(600)

    def free(self) -> None:
        self._free.set()


def one_rollout(store: Store) -> str:
    batch_id = new_batch(store)
    place(store, batch_id)
    return f"{batch_id}.0.0"


def row_of(store: Store, rollout_id: str) -> Any:
    mine = select(rollouts.rollouts).where(rollouts.rollouts.c.rollout_id == rollout_id)
    return store.read(lambda connection: connection.execute(mine).one())


LEASES: list[Leases] = []
ENDED: list[Future[None]] = []


@contextmanager
def holding(
    store: Store, signals: Signals, lease_s: float, limit_s: float = math.inf, excused_s: float = 0.0, **options: float
) -> Iterator[ClaimedWork]:
    """Yield a claim that is held by running work, which ignores a cancel for `unresponsive_s`."""
    rollout_id = one_rollout(store)
    claim = store.write(lambda c: rollouts.claim(c, rollout_id, 1, Stage.INIT, NODE, "w", lease_s))
    assert claim is not None
    loop, leases = Loop(), Leases(store, signals, "w", lease_s, options.get("stall_s", 60.0))
    LEASES.append(leases)
    ENDED.append(Future())
    begun = threading.Event()
    free = asyncio.Event()

    async def work() -> None:
        begun.set()
        until_s = asyncio.get_running_loop().time() + options.get("unresponsive_s", 0.0)
        while True:
            try:
                await free.wait()
                return
            except asyncio.CancelledError:
                if asyncio.get_running_loop().time() > until_s:
                    raise

    def park(held: ClaimedWork) -> None:
        try:
            ENDED[-1].set_result(loop.run(work(), held.working))
        except asyncio.CancelledError as error:
            ENDED[-1].set_exception(error)

    with leases.hold(claim) as held:
        held.limit_s, held.excused_s = limit_s, lambda: excused_s
        parked = threading.Thread(target=park, args=[held])
        parked.start()
        assert begun.wait(600)
        yield held
        loop.call(free.set)
        parked.join(600)
    leases.close()
    loop.close()


def next_attempt(held: Claim) -> Claim:
    return replace(held, attempt=held.attempt + 1)


def revoke_claim(store: Store, rollout_id: str) -> None:
    mine = rollouts.rollouts.c.rollout_id == rollout_id
    away = update(rollouts.rollouts).where(mine).values(attempt=2, state=State.QUEUED.value, owner=None)
    store.write(lambda connection: connection.execute(away) and None)


def now(store: Store) -> float:
    return float(store.read(lambda connection: connection.execute(select(db_now())).scalar_one()))


class TestUncertainCommits:
    def test_stage_with_repeated_messages_is_claimed_once(
        self, database: PostgresProxy, store: Store, made: bool
    ) -> None:
        rollout_id = one_rollout(store)
        database.cut_commits(2, made)
        value = []
        for n_claims in (3, 2):
            # in one transaction; an earlier success does not help refused claims
            kept = BlockedWriter(store)
            result = [self._claim(store, rollout_id) for _ in range(n_claims)]
            kept.free()
            value += [claim for future in result if (claim := future.result(60)) is not None]
        assert database.n_cut == 2
        assert len(value) == 1
        assert row_of(store, rollout_id).state == State.ACTIVE
        assert len(store.read(lambda connection: batches.timings(connection, rollout_id))) == 1
        assert advance(store, value[0])

    def _claim(self, store: Store, rollout_id: str) -> Future[Claim | None]:
        tries: list[float] = []
        return store.submit(
            lambda connection: rollouts.claim(connection, rollout_id, 1, Stage.INIT, NODE, "w", 60.0, tries)
        )

    def test_end_of_a_stage_is_confirmed_after_a_cut_commit(
        self, database: PostgresProxy, store: Store, made: bool
    ) -> None:
        rollout_id = one_rollout(store)
        for stage, summary in ((Stage.INIT, {}), (Stage.RUN, RUN_RESULT)):
            held = claimed(store, rollout_id, stage)
            database.cut_commits(2, made)
            assert advance(store, held, **summary)
        held = claimed(store, rollout_id, Stage.EVAL)
        database.cut_commits(2, made)
        assert finish(store, held)
        assert database.n_cut == 6
        row = row_of(store, rollout_id)
        assert (row.state, row.finish_seq, row.attempt) == (State.COMPLETED, 1, 1)
        assert len(store.read(lambda connection: batches.rewards_of(connection, rollout_id))) == 1

    def test_end_with_a_lost_claim_is_refused_after_a_cut_commit(
        self, database: PostgresProxy, store: Store, made: bool
    ) -> None:
        rollout_id = one_rollout(store)
        held = claimed(store, rollout_id, Stage.INIT)
        revoke_claim(store, rollout_id)
        database.cut_commits(1, made)
        assert not advance(store, held)
        assert database.n_cut == 1

    def test_batch_is_submitted_and_cancelled_once(self, database: PostgresProxy, store: Store, made: bool) -> None:
        service = LocalFarm(store, Signals(""), max_open=1000)
        request = BatchRequest(instances=(Instance(data_source="noop", fields={}),), n_samples=4)
        database.cut_commits(2, made)
        batch_id = service.submit(request)
        assert store.read(lambda connection: batches.recent(connection, 10)) == [batch_id]
        database.cut_commits(2, made)
        assert len(service.cancel(batch_id)) == 4
        assert database.n_cut == 4
        assert status(store, batch_id).n_cancelled == 4

    def test_call_and_artefact_are_recorded_once(self, database: PostgresProxy, store: Store, made: bool) -> None:
        rollout_id = one_rollout(store)
        advance(store, claimed(store, rollout_id, Stage.INIT))
        held = claimed(store, rollout_id, Stage.RUN)
        row = trajectories.CallLog(rollout_id, 1).row(sampled(0, [1], [2]))
        keep = partial(artefacts.keep, held=held, name="a", media_type="text/plain", n_bytes=1, data=b"x")
        database.cut_commits(4, made)
        store.write(lambda connection: trajectories.record_call(connection, row))
        assert store.write(keep)
        assert store.write(lambda connection: True)
        assert len(store.read(lambda connection: trajectories.calls(connection, rollout_id))) == 1
        assert len(store.read(lambda connection: artefacts.listing(connection, rollout_id))) == 1


class TestDatabaseOutage:
    def test_writes_and_reads_wait_until_it_is_over(self, database: PostgresProxy, store: Store) -> None:
        rollout_id = one_rollout(store)
        held = claimed(store, rollout_id, Stage.INIT)
        database.away()
        answers: list[Any] = []
        reader = threading.Thread(target=lambda: answers.append(row_of(store, rollout_id).state))
        reader.start()
        advanced = store.submit(lambda connection: rollouts.advance(connection, held, 3.0))
        broken = store.submit(lambda connection: connection.exec_driver_sql("SELECT nonsense"))
        given_up = store.submit(lambda connection: answers.append("written"))
        many = [store.submit(lambda connection, n=n: n) for n in range(300)]  # type: ignore[misc]
        assert given_up.cancel()
        assert not advanced.done()
        database.back()
        assert advanced.result(60)
        assert broken.exception(60) is not None
        assert [future.result(60) for future in many] == list(range(300))
        reader.join(600)
        assert answers in ([State.ACTIVE], [State.QUEUED])

    def test_writes_and_reads_fail_after_the_time_limit(self, database: PostgresProxy) -> None:
        store = Store(database.url, patience_s=0.5)
        database.away()
        result = [store.submit(lambda connection: True) for _ in range(400)]
        for future in result:
            assert isinstance(future.exception(60), StoreUnavailable)
        with pytest.raises(StoreUnavailable):
            store.read(lambda connection: True)
        database.back()
        assert store.write(lambda connection: True)
        store.close()

    def test_close_fails_waiting_writes(self, database: PostgresProxy) -> None:
        store = Store(database.url, patience_s=math.inf)
        assert store.write(lambda connection: True)
        database.away()
        waiting = store.submit(lambda connection: connection.exec_driver_sql("SELECT 1").scalar())
        store.close()
        assert isinstance(waiting.exception(0), StoreUnavailable)

    def test_write_that_breaks_its_connection_affects_no_other(self, store: Store) -> None:
        def poison(connection: Connection) -> None:
            connection.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")

        kept = BlockedWriter(store)
        first, poisoned, last = store.submit(lambda _: 1), store.submit(poison), store.submit(lambda _: 3)
        kept.free()
        assert (first.result(60), last.result(60)) == (1, 3)
        assert isinstance(poisoned.exception(60), StoreUnavailable)
        assert store.write(lambda connection: 4) == 4


class TestRolloutsDuringOutage:
    def test_calls_are_recorded_after_the_outage(self, database: PostgresProxy, store: Store) -> None:
        rollout_id = one_rollout(store)
        advance(store, claimed(store, rollout_id, Stage.INIT))
        recorder = AttemptRecorder(store, claimed(store, rollout_id, Stage.RUN), 1.0)
        database.away()

        async def main() -> None:
            for index in range(30):
                await recorder.record(sampled(index, [1], [2]))

        asyncio.run(main())
        database.back()
        assert store.write(lambda connection: True)
        assert len(store.read(lambda connection: trajectories.calls(connection, rollout_id))) == 30

    def test_work_continues_until_its_claim_is_known_to_be_lost(
        self, database: PostgresProxy, store: Store, postgres_store: Store
    ) -> None:
        beside = Store(postgres_store.url)
        with holding(store, Signals(""), lease_s=1.5) as work:
            lease = row_of(store, work.claim.rollout_id).lease_expires_at
            database.away()
            until(lambda: now(beside) > row_of(beside, work.claim.rollout_id).lease_expires_at + 1.5, "it has run out")
            assert work.reason is None
            database.back()
            until(lambda: row_of(beside, work.claim.rollout_id).lease_expires_at > lease + 3.0, "it is renewed")
            assert work.reason is None
            revoke_claim(beside, work.claim.rollout_id)
            until(lambda: work.reason is StopReason.LOST, "it is stopped")
        beside.close()

    def test_cancel_is_detected_without_notifications(self, store: Store) -> None:
        with holding(store, Signals("amqp://nobody"), lease_s=600.0) as work:
            LocalFarm(store, Signals(""), max_open=1000).cancel(work.claim.batch_id)
            until(lambda: work.reason is StopReason.CANCELLED, "it is stopped")

    def test_invalid_notifications_are_ignored(self, store: Store, broker_url: str) -> None:
        with holding(store, Signals(broker_url), lease_s=600.0) as work, redis_client(broker_url) as client:
            for rubbish in (b"{", b"7", b"null", b"\xff\xfe", b'[["x"]]'):
                until(lambda rubbish=rubbish: client.publish("farm:cancelled", rubbish), "somebody hears it")  # type: ignore[misc]
            # anybody may have sent that, and the store says otherwise
            looked_at = LEASES[-1]._looked_at
            Signals(broker_url).cancelled([work.claim.rollout_id])
            until(lambda: LEASES[-1]._looked_at > looked_at, "the store is asked")
            assert work.reason is None
            LocalFarm(store, Signals(broker_url), max_open=1000).cancel(work.claim.batch_id)
            until(lambda: work.reason is StopReason.CANCELLED, "it is stopped")

    def test_work_stops_when_a_new_attempt_is_claimed(self, store: Store) -> None:
        with holding(store, Signals(""), lease_s=600.0) as work, LEASES[-1].hold(next_attempt(work.claim)) as another:
            assert (work.reason, another.reason) == (StopReason.LOST, None)


class TestOverdueStages:
    def test_overdue_stage_is_stopped(self, store: Store) -> None:
        with holding(store, Signals(""), lease_s=600.0, limit_s=0.1) as work:
            until(lambda: work.reason is StopReason.OVERDUE, "it is stopped")
            assert isinstance(ENDED[-1].exception(60), asyncio.CancelledError)
            assert not work.is_leaked

    def test_unresponsive_stage_is_abandoned_and_counted(self, store: Store) -> None:
        with holding(store, Signals(""), lease_s=600.0, limit_s=0.1, unresponsive_s=20.0, stall_s=0.2) as work:
            assert isinstance(ENDED[-1].exception(60), asyncio.CancelledError)
            assert work.is_leaked
            until(lambda: LEASES[-1].n_hanging == 1, "it is counted")

    def test_excused_time_extends_the_deadline(self, store: Store) -> None:
        with holding(store, Signals(""), lease_s=600.0, limit_s=0.1, excused_s=600.0) as work:
            lease = row_of(store, work.claim.rollout_id).lease_expires_at
            until(lambda: now(store) > lease - 598.0, "two seconds have passed")
            assert work.reason is None


@contextmanager
def dispatching(store: Store, broker_url: str, lease_s: float) -> Iterator[None]:
    options = Settings(lease_s=lease_s, node_timeout_s=600.0, broker_url=broker_url, audit_s=0.0)
    dispatcher = Dispatcher(store, Signals(broker_url), options, "d")
    thread = threading.Thread(target=dispatcher.run)
    thread.start()
    try:
        yield
    finally:
        dispatcher.stop()
        thread.join(600)


class TestDispatcherLeadership:
    """Workers could not renew their leases during the outage: only those known to be dead have lost them."""

    def test_leader_keeps_leases_that_expired_before_its_election(self, store: Store, broker_url: str) -> None:
        silent, dead = self._claimed(store, lease_s=-1.0)
        store.write(lambda connection: leases.expire_owner(connection, "dead"))
        with dispatching(store, broker_url, lease_s=600.0):
            self._reclaims_only(store, dead, but=silent)

    def test_leader_keeps_leases_that_expired_during_an_outage(
        self, database: PostgresProxy, store: Store, broker_url: str, postgres_store: Store
    ) -> None:
        beside = Store(postgres_store.url)
        signals, ended = Signals(broker_url), threading.Event()

        def wake() -> None:
            while not ended.wait(0.005):
                signals.wake()

        waker = threading.Thread(target=wake)
        waker.start()
        try:
            with dispatching(store, broker_url, lease_s=3.0):
                begun = now(beside)
                silent, dead = self._claimed(store, lease_s=600.0)
                until(lambda: now(beside) > begun + 4.0, "what was before it began does not matter any more")
                database.away()
                away = now(beside)
                until(lambda: now(beside) > away + 3.0, "this is an outage")
                late = update(rollouts.rollouts).where(rollouts.rollouts.c.rollout_id == silent)
                beside.write(lambda connection: connection.execute(late.values(lease_expires_at=1.0)) and None)
                beside.write(lambda connection: leases.expire_owner(connection, "dead"))
                database.back()
                self._reclaims_only(beside, dead, but=silent)
        finally:
            ended.set()
            waker.join(600)
            beside.close()

    def test_unsent_message_is_not_counted_as_sent(self, store: Store, tmp_path: Path) -> None:
        announce(store)
        place(store, new_batch(store, n=1))
        row = rollouts.rollouts
        often = update(row).values(n_sends=9, resend_at=0.0)
        store.write(lambda connection: connection.execute(often) and None)
        soon = select(row.c.rollout_id).where(row.c.n_sends == 1, row.c.resend_at < db_now() + 10.0)
        with dispatching(store, f"redis+socket://{tmp_path / 'nobody.sock'}", lease_s=600.0):
            until(lambda: store.read(lambda connection: connection.execute(soon).first()), "it is rung soon", 60)

    def _claimed(self, store: Store, lease_s: float) -> list[str]:
        announce(store, lease_s=600.0)
        result = [one_rollout(store) for _ in range(2)]
        for rollout_id, owner in zip(result, ("silent", "dead"), strict=True):
            assert claim(store, rollout_id, Stage.INIT, owner=owner, lease_s=lease_s) is not None
        return result

    def _reclaims_only(self, store: Store, dead: str, but: str) -> None:
        until(lambda: row_of(store, dead).attempt == 2, "it is taken back")
        assert (row_of(store, but).state, row_of(store, but).attempt) == (State.ACTIVE, 1)


class TestExpiredLeases:
    def test_leases_are_reclaimed_only_while_expired(self, store: Store) -> None:
        rollout_id = one_rollout(store)
        held = claimed(store, rollout_id, Stage.INIT, lease_s=-1.0)
        assert [each.rollout_id for each in self._expired(store)] == [rollout_id]
        assert self._expired(store, known_dead=True) == [], "it may only have been kept from saying that it lives"
        assert store.read(lambda connection: leases.is_expired(connection, held))
        store.write(lambda connection: leases.renew(connection, "w", [rollout_id], 60.0))
        assert not store.read(lambda connection: leases.is_expired(connection, held))
        assert self._expired(store) == []
        store.write(lambda connection: leases.expire_owner(connection, "w"))
        assert [each.rollout_id for each in self._expired(store, known_dead=True)] == [rollout_id]

    def _expired(self, store: Store, known_dead: bool = False) -> list[Claim]:
        return list(store.read(lambda connection: leases.expired(connection, 10, known_dead=known_dead)))
