"""Queued rollouts are read in order and only as far as requested, and the limit of open rollouts is enforced."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Connection, func, select, update

from farm.errors import Conflict, InvalidRequest, Overloaded
from farm.ids import RolloutRef
from farm.records.engine_state import StoredEngine
from farm.records.request import BatchRequest, Instance
from farm.retry_policy import WITHOUT_WEIGHTS
from farm.store import batches, cancel_and_rescore, llm_engines, placement
from farm.store.access.api_keys import n_open
from farm.store.database import Store
from farm.store.placement import StageMessage, WaitingBatch
from farm.store.rollouts import batches as table
from farm.store.rollouts import rollouts
from tests.secret_keys import key_of


def new_batch(
    store: Store,
    n: int,
    n_samples: int = 1,
    priority: int = 0,
    key: str | None = None,
    max_open: int | None = None,
) -> str:
    problem = Instance(data_source="noop", fields={})
    request = BatchRequest(instances=(problem,) * n, n_samples=n_samples, priority=priority, idempotency_key=key)

    def create(connection: Connection) -> str:
        batch_id = batches.create(connection, request, f"{n}", key_of(store), max_open)[0]
        # in SQLite, two within a millisecond would have the same age
        n_seconds = connection.execute(select(func.count()).select_from(table)).scalar_one()
        later = update(table).where(table.c.batch_id == batch_id).values(created_at=table.c.created_at + n_seconds)
        connection.execute(later)
        return batch_id

    return store.write(create)


def waiting(store: Store, limit: int) -> list[WaitingBatch]:
    return store.read(lambda connection: placement.waiting(connection, limit))


def place(store: Store, batch_id: str, limit: int, node: str = "n1") -> list[str]:
    result = store.read(lambda connection: placement.next_of(connection, batch_id, limit))
    stage_messages = [StageMessage(each.rollout_id, each.attempt, each.stage, node) for each in result]
    store.write(lambda connection: placement.place(connection, stage_messages, 3.0))
    return [message.rollout_id.removeprefix(f"{batch_id}.") for message in stage_messages]


def test_empty_farm_has_no_waiting_batches(store: Store) -> None:
    assert waiting(store, 10) == []


def test_waiting_rollouts_are_counted_up_to_the_limit_oldest_first(store: Store) -> None:
    ids = [new_batch(store, n, priority=priority) for n, priority in ((30, 0), (2, 5), (30, -1))]
    place(store, ids[0], 3)
    place(store, ids[0], 4, "n2")
    assert waiting(store, 10) == [
        WaitingBatch(ids[0], 0, 10, 7),
        WaitingBatch(ids[1], 5, 2, 0),
        WaitingBatch(ids[2], -1, 10, 0),
    ]


def test_placed_or_ended_batch_does_not_wait(store: Store) -> None:
    placed, cancelled, left = (new_batch(store, 3) for _ in range(3))
    place(store, placed, 10)
    store.write(lambda connection: cancel_and_rescore.cancel(connection, RolloutRef(cancelled)))
    assert [wait.batch_id for wait in waiting(store, 10)] == [left]


def test_whole_groups_are_placed_first(store: Store) -> None:
    batch_id = new_batch(store, 3, n_samples=2)
    assert place(store, batch_id, 3) == ["0.0", "0.1", "1.0"]
    assert place(store, batch_id, 10) == ["1.1", "2.0", "2.1"]


def test_batch_beyond_the_limit_of_open_rollouts_is_refused(store: Store) -> None:
    first = new_batch(store, 4, max_open=6)
    with pytest.raises(Overloaded, match="4 rollouts are open; 3 more would exceed 6"):
        new_batch(store, 3, max_open=6)
    assert store.read(lambda connection: batches.recent(connection, 10)) == [first]
    second = new_batch(store, 2, max_open=6)
    store.write(lambda connection: cancel_and_rescore.cancel(connection, RolloutRef(first)))
    assert store.read(n_open) == 2
    assert len({first, second, new_batch(store, 4, max_open=6)}) == 3


def test_concurrent_submits_stay_below_the_limit(store: Store) -> None:
    others = [Store(store.url) for _ in range(6)]
    start = threading.Barrier(len(others))

    def submit(other: Store) -> bool:
        start.wait()
        try:
            new_batch(other, 40, max_open=100)
        except Overloaded:
            return False
        return True

    try:
        with ThreadPoolExecutor(len(others)) as threads:
            taken = sum(threads.map(submit, others))
    finally:
        for other in others:
            other.close()
    assert (taken, store.read(n_open)) == (2, 80)


def test_batch_larger_than_the_limit_is_invalid(store: Store) -> None:
    with pytest.raises(InvalidRequest, match="several batches"):
        new_batch(store, 7, max_open=6)


def test_existing_batch_is_found_at_the_limit(store: Store) -> None:
    batch_id = new_batch(store, 4, key="again", max_open=4)
    assert new_batch(store, 4, key="again", max_open=4) == batch_id
    with pytest.raises(Conflict):
        new_batch(store, 3, key="again", max_open=4)


def test_batch_is_open_until_its_last_rollout_ends(store: Store) -> None:
    batch_id = new_batch(store, 2)
    assert store.read(lambda connection: batches.has_open(connection, batch_id))
    store.write(lambda connection: cancel_and_rescore.cancel(connection, RolloutRef(batch_id, 0, 0)))
    assert store.read(lambda connection: batches.has_open(connection, batch_id))
    store.write(lambda connection: cancel_and_rescore.cancel(connection, RolloutRef(batch_id)))
    assert not store.read(lambda connection: batches.has_open(connection, batch_id))


def test_rollout_without_weights_waits_for_an_engine_that_has_them(store: Store) -> None:
    batch_id = new_batch(store, 2)
    url = "http://a/v1"
    store.write(lambda connection: llm_engines.add(connection, StoredEngine(url), key_of(store)))
    store.write(lambda connection: llm_engines.set_version(connection, "7", None))
    handed_back = update(rollouts).where(rollouts.c.group_index == 0).values(failure_kind=WITHOUT_WEIGHTS)
    store.write(lambda connection: connection.execute(handed_back) and None)
    assert place(store, batch_id, 10) == ["1.0"], "what needs no engine goes on"
    assert waiting(store, 10) == []
    store.write(lambda connection: llm_engines.carried_out(connection, url, 1, "", "7"))
    assert place(store, batch_id, 10) == ["0.0"]
