"""A node's queries for upcoming starts: few while it is idle, and few in a farm of many nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from farm.records.node import Node
from farm.records.request import BatchRequest, Instance
from farm.records.rollout import Stage
from farm.store import batches, nodes, placement
from farm.store.database import Store
from farm.store.placement import StageMessage, UpcomingStart
from tests.secret_keys import key_of
from workers.process.warm_pool_filler import UpcomingStarts


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def submit(store: Store, n: int) -> str:
    request = BatchRequest(instances=(Instance(data_source="noop", fields={}),), n_samples=n)
    return store.write(lambda connection: batches.create(connection, request, "f", key_of(store)))[0]


def announce(store: Store, n_nodes: int) -> None:
    def all_of_them(connection: Any) -> None:
        for number in range(n_nodes):
            nodes.announce(connection, Node(f"n{number}", 4, 1, 2, 1, [], {}, instance=str(number)))

    store.write(all_of_them)


@contextmanager
def questions(store: Store) -> Iterator[list[str]]:
    result: list[str] = []

    def executed(connection: object, cursor: object, statement: str, *rest: object) -> None:
        if statement.startswith(("SELECT", "WITH")):
            result.append(statement)

    event.listen(store.engine, "before_cursor_execute", executed)
    yield result
    event.remove(store.engine, "before_cursor_execute", executed)


def queries_within(store: Store, clock: Clock, starts: UpcomingStarts, seconds: float) -> list[str]:
    """Return the queries in a number of seconds, with two looks a second."""
    with questions(store) as result:
        until = clock.now + seconds
        while clock.now < until:
            list(starts.first(8))
            clock.now += 0.5
    return result


def n_full_queries(queries: list[str]) -> int:
    return sum("RECURSIVE" in each for each in queries)


def test_idle_node_queries_rarely(sqlite_store: Store) -> None:
    announce(sqlite_store, 1)
    clock = Clock()
    starts = UpcomingStarts(sqlite_store, "n0", 60.0, clock)
    queries = queries_within(sqlite_store, clock, starts, 20.0)
    assert (n_full_queries(queries), len(queries)) == (10, 20)


def test_rate_of_full_queries_does_not_depend_on_the_number_of_nodes(sqlite_store: Store) -> None:
    announce(sqlite_store, 40)
    submit(sqlite_store, 100)
    clock = Clock()
    starts = UpcomingStarts(sqlite_store, "n0", 60.0, clock)
    assert n_full_queries(queries_within(sqlite_store, clock, starts, 40.0)) == 4


def test_rollouts_that_waited_long_ago_are_dropped(sqlite_store: Store) -> None:
    announce(sqlite_store, 100)
    batch_id = submit(sqlite_store, 3)
    clock = Clock()
    starts = UpcomingStarts(sqlite_store, "n0", 60.0, clock)
    assert list(starts.first(8)) == [UpcomingStart(batch_id, 0, 3)]
    clock.now += 9.0
    assert list(starts.first(8)) == [UpcomingStart(batch_id, 0, 3)]
    clock.now += 2.0
    assert list(starts.first(8)) == []


def test_rollouts_placed_on_the_node_are_seen_at_the_next_query(sqlite_store: Store) -> None:
    announce(sqlite_store, 1)
    clock = Clock()
    starts = UpcomingStarts(sqlite_store, "n0", 60.0, clock)
    assert list(starts.first(8)) == []
    batch_id = submit(sqlite_store, 2)
    message = StageMessage(f"{batch_id}.0.0", 1, Stage.INIT, "n0")
    sqlite_store.write(lambda connection: placement.place(connection, [message], 3.0))
    clock.now += 2.0
    assert list(starts.first(8)) == [UpcomingStart(batch_id, 0, 1), UpcomingStart(batch_id, 0, 1)]
    clock.now += 0.5
    assert list(starts.first(1)) == [UpcomingStart(batch_id, 0, 1)], "it queries repeatedly while there is demand"
