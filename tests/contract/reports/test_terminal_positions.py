"""The order of ended rollouts for protocols: it never changes, and skips none, however late an end is committed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any

from sqlalchemy import Connection, select, update
from sqlalchemy.exc import IntegrityError

from farm.ids import RolloutRef, rollout_id
from farm.records.request import BatchRequest, Instance
from farm.store import batches, cancel_and_rescore
from farm.store.database import Store
from farm.store.reports import keyed_rollouts
from farm.store.rollouts import batches as batches_table
from farm.store.rollouts import rollouts
from farm.store.sql.clock import db_now
from testkit.deadline import LONG_S
from tests.secret_keys import key_of

PREFIX = "p:"


def begin(store: Store, name: str) -> str:
    problem = (Instance(data_source="noop", fields={}),)
    request = BatchRequest(instances=problem, idempotency_key=f"{PREFIX}{name}", metadata={"name": name})
    return store.write(lambda connection: batches.create(connection, request, name, key_of(store)))[0]


def end(store: Store, batch_id: str, ago_s: float = 0.0) -> None:
    def work(connection: Connection) -> None:
        cancel_and_rescore.cancel(connection, RolloutRef(batch_id))
        mine = update(rollouts).where(rollouts.c.batch_id == batch_id)
        connection.execute(mine.values(finished_at=db_now() - ago_s))

    store.write(work)


def assign_and_list(store: Store, after: int = 0, limit: int = 10) -> tuple[list[str], int, int]:
    with suppress(IntegrityError):
        store.write(partial(keyed_rollouts.assign_positions, prefix=PREFIX))
    page = partial(keyed_rollouts.ended, prefix=PREFIX, consumer="c", after=after, limit=limit)
    rows, last, total = store.read(page)
    return [metadata["name"] for metadata, _, _ in rows], last, total


def test_positions_are_kept_and_pages_are_consecutive(store: Store) -> None:
    assert assign_and_list(store) == ([], 0, 0)
    assert assign_and_list(store, after=7) == ([], 7, 0)
    ids = {name: begin(store, name) for name in "abcd"}
    for name, ago_s in (("c", 3.0), ("a", 2.0)):
        end(store, ids[name], ago_s)
    assert store.read(partial(keyed_rollouts.any_without_position, prefix=PREFIX))
    assert assign_and_list(store) == (["c", "a"], 2, 2)
    assert not store.read(partial(keyed_rollouts.any_without_position, prefix=PREFIX))
    waiting = select(batches_table.c.batch_id).where(batches_table.c.awaits_position.is_not(None))
    found = store.read(lambda connection: connection.execute(waiting).scalars().all())
    assert {*found} == {ids["d"], ids["b"]}, "those with a position are not read again"
    end(store, ids["d"], 100.0)
    end(store, ids["b"])
    assert assign_and_list(store, after=2) == (["d", "b"], 4, 4), "earlier ends that come later come later in the pages"
    assert assign_and_list(store, after=1, limit=2) == (["a", "d"], 3, 4)
    again = update(rollouts).where(rollouts.c.batch_id == ids["c"]).values(finished_at=None)
    store.write(lambda connection: connection.execute(again))
    assert assign_and_list(store, after=2) == (["d", "b"], 4, 4), "a rollout that is scored again shifts no other"


def test_end_with_a_slow_commit_is_not_skipped(store: Store) -> None:
    slow, quick = begin(store, "slow"), begin(store, "quick")
    held, go = threading.Event(), threading.Event()
    name = rollout_id(slow, 0, 0)

    def ends(connection: Connection) -> None:
        cancel_and_rescore.cancel(connection, RolloutRef(slow))
        of_long_ago = update(rollouts).where(rollouts.c.rollout_id == name)
        connection.execute(of_long_ago.values(finished_at=db_now() - 3600))
        held.set()
        assert go.wait(LONG_S)

    if store.url.startswith("sqlite"):
        # it has one writer at a time, so nothing is committed while another transaction is open
        go.set()
    other = Store(store.url)
    try:
        with ThreadPoolExecutor(1) as threads:
            committed = threads.submit(other.write, ends)
            assert held.wait(LONG_S)
            if go.is_set():
                wait([committed])
            else:
                end(store, quick)
                assert assign_and_list(store) == (["quick"], 1, 1)
                go.set()
                wait([committed])
                assert assign_and_list(store, after=1) == (["slow"], 2, 2)
    finally:
        other.close()
    assert sorted(assign_and_list(store)[0]) == (["slow"] if store.url.startswith("sqlite") else ["quick", "slow"])


def test_concurrent_processes_give_each_end_one_position(store: Store) -> None:
    others = [Store(store.url) for _ in range(4)]
    for n in range(8):
        end(store, begin(store, f"{n}"), 8.0 - n)
    start = threading.Barrier(len(others))

    def tell(other: Store) -> Any:
        start.wait()
        return assign_and_list(other)

    try:
        with ThreadPoolExecutor(len(others)) as threads:
            results = list(threads.map(tell, others))
    finally:
        for other in others:
            other.close()
    assert results == [([str(n) for n in range(8)], 8, 8)] * 4
