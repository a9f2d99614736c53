"""The store's clock jumps, ahead or back: nothing waits longer than intended, and nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import update

from farm.notifications import Signals
from farm.records.rollout import Stage, State
from farm.scheduler.dispatcher import Dispatcher
from farm.settings import Settings
from farm.store import batches, leader, leases, llm_engines, nodes, placement, rollouts
from farm.store.database import Store
from farm.store.sql.clock import Timekeeper, db_now, store_time
from tests.contract.store.test_store import NODE, advance, announce, claim, claimed, fail, new_batch, place
from tests.services.farms import until
from tests.services.servers.skewed_clock import Skewed

HOUR_S = 3600.0


@pytest.fixture
def clock(store: Store) -> Skewed:
    return Skewed(store)


@pytest.fixture
def skewed(clock: Skewed) -> Iterator[Store]:
    opened = clock.open()
    yield opened
    opened.close()


def test_time_is_that_of_the_store(clock: Skewed, skewed: Store) -> None:
    before = skewed.read(store_time)
    clock.set(-HOUR_S)
    assert before - HOUR_S <= skewed.read(store_time) < before - HOUR_S + 60


@pytest.mark.parametrize("off_s", [-HOUR_S, -100.0, 1e7])
class TestClockJumps:
    def test_waiting_rollout_is_placed_at_once(self, clock: Skewed, skewed: Store, off_s: float) -> None:
        batch_id = new_batch(skewed, 2)
        place(skewed, batch_id)
        fail(skewed, claimed(skewed, f"{batch_id}.1.0", Stage.INIT), 50.0)
        fresh = new_batch(skewed)
        clock.set(off_s)
        waits = {each.batch_id for each in skewed.read(lambda connection: placement.waiting(connection, 9))}
        assert waits == {batch_id, fresh}

    def test_undelivered_message_is_sent_again(self, clock: Skewed, skewed: Store, off_s: float) -> None:
        announce(skewed)
        batch_id = new_batch(skewed)
        place(skewed, batch_id)
        assert not skewed.read(placement.any_undelivered)
        clock.set(off_s)
        assert skewed.read(placement.any_undelivered)
        assert len(skewed.write(lambda connection: placement.undelivered(connection, 3.0, 9))) == 1
        assert not skewed.read(placement.any_undelivered)

    def test_leadership_passes_at_once_to_another(self, clock: Skewed, skewed: Store, off_s: float) -> None:
        assert skewed.write(lambda connection: leader.acquire_leadership(connection, "r", "a", 10.0))
        assert skewed.read(lambda connection: leader.is_led_by_other(connection, "r", "b", 10.0))
        assert not skewed.write(lambda connection: leader.acquire_leadership(connection, "r", "b", 10.0))
        clock.set(off_s)
        assert not skewed.read(lambda connection: leader.is_led_by_other(connection, "r", "b", 10.0))
        assert skewed.write(lambda connection: leader.acquire_leadership(connection, "r", "b", 10.0))
        assert not skewed.write(lambda connection: leader.acquire_leadership(connection, "r", "a", 10.0))

    def test_old_heartbeats_and_reports_are_ignored(self, clock: Skewed, skewed: Store, off_s: float) -> None:
        announce(skewed)
        skewed.write(lambda connection: llm_engines.report(connection, "gone", {}))
        clock.set(off_s)
        (node,) = skewed.read(nodes.listing)
        assert node.heartbeat_age_s > 60.0
        assert skewed.read(lambda connection: nodes.n_healthy(connection, 60.0)) == 0
        assert skewed.read(lambda connection: llm_engines.uses(connection, 30.0)) == {}
        assert skewed.write(lambda connection: nodes.heartbeat(connection, node))
        assert skewed.read(nodes.listing)[0].heartbeat_age_s < 60.0

    def test_out_of_service_node_is_tried_again(self, clock: Skewed, skewed: Store, off_s: float) -> None:
        announce(skewed)
        sick = update(nodes.nodes).values(out_of_service_until=db_now() + 40.0, out_of_service_why="x", n_trips=1)
        skewed.write(lambda connection: connection.execute(sick) and None)
        assert skewed.read(nodes.listing)[0].out_of_service_s > 0
        clock.set(off_s)
        # an hour back is further ahead than any node is ever out of service
        assert (skewed.read(nodes.listing)[0].out_of_service_s > 0) == (off_s == -100.0)


class TestTimekeeper:
    @pytest.mark.parametrize(
        ("requested", "found", "answered", "jump_s"),
        [
            (10.0, 1010.0, 10.1, 0.0),
            # the store did not answer for a minute, and returns the time of the request, or of the response
            (10.0, 1010.0, 70.0, 0.0),
            (10.0, 1070.0, 70.0, 0.0),
            (10.0, 1011.5, 10.1, 0.0),
            (10.0, 4610.0, 10.0, 3600.0),
            (10.0, -2590.0, 10.0, -3600.0),
            (10.0, 1100.0, 70.0, 30.0),
            (10.0, 980.0, 70.0, -30.0),
        ],
    )
    def test_jump_excludes_the_waiting_time(
        self, requested: float, found: float, answered: float, jump_s: float
    ) -> None:
        own = iter([0.0, 0.0, requested, answered])
        keeper = Timekeeper(lambda: next(own))
        assert keeper.read(lambda: 1000.0) == (1000.0, 0.0)
        now, found_s = keeper.read(lambda: found)
        assert now == found
        assert found_s == pytest.approx(jump_s)


@contextmanager
def dispatching(store: Store, lease_s: float) -> Iterator[None]:
    # its node sends one heartbeat, and on a busy machine a placement may take long
    options = Settings(lease_s=lease_s, node_timeout_s=600.0, audit_s=0.0, tick_s=0.1, broker_url="memory://")
    dispatcher = Dispatcher(store, Signals(""), options, "d")
    thread = threading.Thread(target=dispatcher.run)
    thread.start()
    try:
        yield
    finally:
        dispatcher.stop()
        thread.join(600)


class TestClaims:
    """Renewed claims are kept, whatever the clock does; others are requeued within a lease or two."""

    @pytest.mark.parametrize("off_s", [-HOUR_S, HOUR_S])
    def test_claims_of_live_workers_are_kept_and_of_dead_ones_requeued(
        self, clock: Skewed, skewed: Store, off_s: float, caplog: pytest.LogCaptureFixture
    ) -> None:
        announce(skewed)
        batch_id = new_batch(skewed, 2)
        place(skewed, batch_id)
        new_batch(skewed)
        alive, dead = (f"{batch_id}.{index}.0" for index in range(2))
        for rollout_id, owner in ((alive, "alive"), (dead, "dead")):
            assert claim(skewed, rollout_id, Stage.INIT, owner=owner, lease_s=600.0) is not None
        # a busy machine may leave the living worker without a processor for seconds
        lease_s = 5.0
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(0.3):
                skewed.write(lambda c: leases.renew(c, "alive", [alive], lease_s), urgent=True)

        def attempts() -> list[int]:
            return [each.attempt for each in skewed.read(lambda c: batches.rollouts_of(c, batch_id))]

        with dispatching(skewed, lease_s):
            # it reads the clock before it places anything
            until(lambda: sum(skewed.read(placement.occupied).values()) == 3, "it leads, and has read the clock")
            renewer = threading.Thread(target=renew)
            renewer.start()
            try:
                # a lease that is 600 s ahead is not longer than allowed here
                later = update(rollouts.rollouts).where(rollouts.rollouts.c.rollout_id == dead)
                skewed.write(lambda c: c.execute(later.values(lease_expires_at=db_now() + lease_s)) and None)
                clock.set(off_s)
                until(lambda: attempts()[1] == 2, "the dead one's is taken back")
                assert attempts() == [1, 2]
            finally:
                ended.set()
                renewer.join(600)
        assert "the store's clock jumped" in caplog.text


def test_new_dispatcher_requeues_claims_leased_before_a_clock_jump(clock: Skewed, skewed: Store) -> None:
    announce(skewed)
    batch_id = new_batch(skewed)
    place(skewed, batch_id)
    assert claim(skewed, f"{batch_id}.0.0", Stage.INIT, owner="dead", lease_s=2.0) is not None
    clock.set(-HOUR_S)
    with dispatching(skewed, 1.0):
        until(lambda: skewed.read(lambda c: batches.rollout(c, f"{batch_id}.0.0")).attempt == 2, "it is taken back")


def test_stage_advances_after_a_clock_jump(clock: Skewed, skewed: Store) -> None:
    batch_id = new_batch(skewed)
    place(skewed, batch_id)
    held = claimed(skewed, f"{batch_id}.0.0", Stage.INIT)
    clock.set(-HOUR_S)
    assert advance(skewed, held)
    assert skewed.read(lambda c: batches.rollout(c, held.rollout_id)).state is State.QUEUED
    assert skewed.read(lambda c: placement.occupied(c)) == {NODE: 1}
