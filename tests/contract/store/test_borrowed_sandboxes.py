"""Borrowed sandboxes in a store: names, capacity, leases, ends; and how the dispatcher gives them slots."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import update

from farm.callers import Caller, Scope, acting_for
from farm.client.local import LocalAccess
from farm.client.sandboxes.local_borrower import LocalBorrower
from farm.errors import Conflict, Forbidden, InvalidRequest, NotFound, Overloaded, SandboxEnded
from farm.notifications import Signals
from farm.records.lending.borrowed_sandbox import BorrowRequest, SandboxState
from farm.records.request import BatchRequest, Instance
from farm.scheduler.dispatcher import Dispatcher
from farm.settings import settings
from farm.store import batches, borrowed_sandboxes, placement
from farm.store.borrowed_sandboxes import borrowed
from farm.store.database import Store
from tests.contract.store.test_store import NODE, announce
from tests.secret_keys import key_of

URL = "http://127.0.0.1:9"


@pytest.fixture
def borrower(store: Store) -> LocalBorrower:
    return LocalBorrower(store, Signals(""), 10)


def begin(borrower: LocalBorrower, **fields: Any) -> str:
    return borrower.begin(BorrowRequest.model_validate(fields)).sandbox_id


def state(borrower: LocalBorrower, sandbox_id: str) -> SandboxState:
    return borrower.get(sandbox_id).state


def admit(store: Store) -> Dispatcher:
    dispatcher = Dispatcher(store, Signals(""), replace_settings(), "tests")
    dispatcher._admit()
    return dispatcher


def replace_settings() -> Any:
    return settings().model_copy(update={"broker_url": "memory://"})


def run_all(store: Store) -> None:
    for sandbox_id in store.read(lambda connection: borrowed_sandboxes.ids_of_node(connection, NODE)):
        store.write(partial(borrowed_sandboxes.note_address, sandbox_id=sandbox_id, node=NODE, url=URL))


def expire(store: Store, sandbox_id: str) -> None:
    late = update(borrowed).where(borrowed.c.sandbox_id == sandbox_id).values(lease_expires_at=time.time() - 1)
    store.write(lambda connection: connection.execute(late))


def test_name_identifies_one_sandbox_at_a_time(borrower: LocalBorrower) -> None:
    first = begin(borrower, name="mine")
    assert begin(borrower, name="mine") == first
    with pytest.raises(Conflict, match=first):
        begin(borrower, name="mine", lease_s=17)
    assert borrower.get("mine").sandbox_id == first
    borrower.stop("mine")
    borrower.stop("mine")
    assert (state(borrower, first), borrower.get(first).finished) == (SandboxState.ENDED, True)
    second = begin(borrower, name="mine")
    assert second != first
    assert borrower.get("mine").sandbox_id == second
    assert [each.sandbox_id for each in borrower.list()] == [second]
    assert {each.sandbox_id for each in borrower.list(ended=True)} == {first, second}


def test_invalid_borrow_request_leaves_nothing(borrower: LocalBorrower) -> None:
    for fields, reason in (
        ({"spec": {"kind": "klingon"}}, "no kind of sandbox 'klingon'"),
        ({"spec": {"network": True}}, 'network="allow"'),
        ({"spec": {"network_in": ["run"]}}, 'network="allow"'),
        ({"name": "s-0123456789abcdef"}, "look like an id"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            begin(borrower, **fields)
    assert borrower.list(ended=True) == []
    with pytest.raises(NotFound, match="s-0000"):
        borrower.get("s-0000000000000000")


@pytest.mark.parametrize("reference", ["\0", "a\0b", "\ud800", "é" * 5000, "", "s-" + "0" * 16])
def test_unknown_reference_is_not_found(store: Store, borrower: LocalBorrower, reference: str) -> None:
    for use in (borrower.get, borrower.address, borrower.renew, borrower.stop, LocalAccess(store).revoke_key):
        with pytest.raises(NotFound, match="there is no"):
            use(reference)


def test_number_of_open_sandboxes_is_limited(borrower: LocalBorrower) -> None:
    ids = [begin(borrower) for _ in range(10)]
    with pytest.raises(Overloaded, match="FARM_MAX_SANDBOXES"):
        begin(borrower)
    borrower.stop(ids[0])
    begin(borrower)


def test_dispatcher_alternates_between_batches_and_sandboxes(store: Store, borrower: LocalBorrower) -> None:
    announce(store, n_slots=2)
    request = BatchRequest(instances=(Instance(data_source="noop", fields={}),) * 8)
    batch_id, _ = store.write(lambda connection: batches.create(connection, request, "f", key_of(store)))
    ids = [begin(borrower) for _ in range(8)]
    admit(store)
    lent = [each for each in ids if state(borrower, each) is SandboxState.STARTING]
    assert (len(lent), lent) == (3, ids[:3])
    assert store.read(placement.occupied) == {NODE: 6}
    begin(borrower, priority=5)
    borrower.stop(ids[0])
    admit(store)
    by_priority = store.read(lambda connection: borrowed_sandboxes.waiting(connection, 100))
    assert {each.priority: each.n_waiting for each in by_priority} == {0: 5}, "the urgent one got the slot"
    assert store.read(lambda connection: batches.status(connection, batch_id)).n_rollouts == 8


def test_expired_lease_ends_the_sandbox(store: Store, borrower: LocalBorrower) -> None:
    announce(store)
    kept, dropped = begin(borrower), begin(borrower)
    dispatcher = admit(store)
    run_all(store)
    assert borrower.address(kept)[1] is not None
    for each in (kept, dropped):
        expire(store, each)
    borrower.renew(kept, 50)
    dispatcher._end_borrowed(())
    assert state(borrower, dropped) is SandboxState.RUNNING, "a dispatcher that has just begun takes no lease for over"
    dispatcher._leases_count_at = 0.0
    dispatcher._end_borrowed(())
    assert (state(borrower, kept), borrower.get(kept).lease_s) == (SandboxState.RUNNING, 50)
    assert "lease ran out" in borrower.get(dropped).ended_why
    assert not borrower.get(dropped).finished
    with pytest.raises(SandboxEnded, match="lease ran out"):
        borrower.renew(dropped)


def test_lost_node_ends_its_sandboxes_and_drained_node_requeues_starts(store: Store, borrower: LocalBorrower) -> None:
    announce(store)
    ran = begin(borrower)
    admit(store)
    run_all(store)
    waited = begin(borrower)
    dispatcher = admit(store)
    assert store.write(lambda connection: placement.requeue_unstarted(connection, NODE)) == 1
    assert (state(borrower, ran), state(borrower, waited)) == (SandboxState.RUNNING, SandboxState.WAITING)
    assert not store.write(lambda connection: borrowed_sandboxes.note_address(connection, waited, NODE, URL)), (
        "its start was taken away"
    )
    dispatcher._end_borrowed([NODE])
    assert NODE in borrower.get(ran).ended_why
    assert Counter(each.state for each in borrower.list(ended=True)) == {
        SandboxState.ENDED: 1,
        SandboxState.WAITING: 1,
    }


def test_repeated_create_after_a_lost_answer_makes_one_sandbox(store: Store) -> None:
    create = partial(
        borrowed_sandboxes.create,
        request=BorrowRequest(),
        sandbox_id="s-0123456789abcdef",
        token="t",
        max_open=1,
        caller=Caller("one"),
    )
    first, second = (store.write(create) for _ in range(2))
    assert (first[0].sandbox_id, first[1]) == (second[0].sandbox_id, second[1]) == ("s-0123456789abcdef", True)


def test_ended_sandboxes_are_kept_for_a_day(store: Store, borrower: LocalBorrower) -> None:
    ids = [begin(borrower) for _ in range(3)]
    for each in ids[:2]:
        borrower.stop(each)
    old = update(borrowed).where(borrowed.c.sandbox_id == ids[0]).values(ended_at=time.time() - 90_000)
    store.write(lambda connection: connection.execute(old))
    dispatcher = admit(store)
    dispatcher._next_sweep = 0.0
    dispatcher._round()
    assert {each.sandbox_id for each in borrower.list(ended=True)} == set(ids[1:]), "no lease had run out"


def test_finished_name_is_reusable_and_lost_name_is_known(store: Store, borrower: LocalBorrower) -> None:
    assert borrower.newest_named("t") is None
    announce(store)
    begin(borrower, name="t")
    dispatcher = admit(store)
    dispatcher._end_borrowed([NODE])
    lost = borrower.newest_named("t")
    assert lost is not None
    assert (lost.ended, lost.finished) == (True, False)
    borrower.finish_named("t")
    finished = borrower.newest_named("t")
    assert finished == replace(lost, finished=True, age_s=finished.age_s if finished else 0.0)
    assert borrower.counts("t") == {SandboxState.WAITING: 0, SandboxState.STARTING: 0, SandboxState.RUNNING: 0}


def test_key_uses_only_its_own_sandboxes_up_to_its_quota(store: Store, borrower: LocalBorrower) -> None:
    one, other = Caller("one", (Scope.SUBMIT,), max_open=1), Caller("other", (Scope.SUBMIT,))
    with acting_for(one), pytest.raises(Forbidden, match="'one' was revoked"):
        begin(borrower)
    LocalAccess(store).add_key("one", ["submit"], max_open=1)
    with acting_for(one):
        first = begin(borrower, name="x")
        with pytest.raises(Overloaded, match="'one' has borrowed 1"):
            begin(borrower)
    with acting_for(other):
        second = begin(borrower, name="x")
        assert borrower.get("x").sandbox_id == second != first
        for use in (borrower.stop, borrower.renew):
            with pytest.raises(Forbidden, match="'one' borrowed"):
                use(first)
        borrower.finish_named("x")
    assert (state(borrower, first), state(borrower, second)) == (SandboxState.WAITING, SandboxState.ENDED)
    with acting_for(Caller("night", (Scope.OPERATE,))):
        assert borrower.stop(first).ended


def test_quota_holds_for_concurrent_requests(store: Store, borrower: LocalBorrower) -> None:
    LocalAccess(store).add_key("one", ["submit"], max_open=1)

    def ask(_: int) -> bool:
        with acting_for(Caller("one", (Scope.SUBMIT,), max_open=1)), suppress(Overloaded):
            begin(borrower)
            return True
        return False

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(ask, range(8))) == 1
