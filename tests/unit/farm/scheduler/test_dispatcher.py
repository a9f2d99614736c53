"""Hints that make the dispatcher query the store, and its pauses between rounds."""

from __future__ import annotations

import pytest

from farm.notifications import ENDED, WAKE, Signals
from farm.records.node import Node
from farm.records.request import BatchRequest, Instance
from farm.scheduler.dispatcher import Dispatcher, rest_s
from farm.settings import Settings
from farm.store import batches, nodes
from farm.store.database import Store
from tests.secret_keys import key_of


def dispatcher_on(store: Store) -> Dispatcher:
    """Return the dispatcher of a node with room for one rollout."""
    node = Node(node="n", room=1, init_slots=1, run_slots=1, eval_slots=1, handlers=["noop"], info={})
    store.write(lambda connection: nodes.announce(connection, node))
    return Dispatcher(store, Signals(""), Settings(audit_s=0.0, broker_url="memory://"), "d")


def test_ended_rollout_is_a_reason_only_while_another_waits(sqlite_store: Store) -> None:
    dispatcher = dispatcher_on(sqlite_store)
    assert dispatcher.is_due(ENDED, "b"), "it has not queried the store yet"
    dispatcher._admit()
    assert not dispatcher.is_due(ENDED, "b")
    assert dispatcher.is_due(WAKE, "")
    request = BatchRequest(instances=(Instance(data_source="noop", fields={}),), n_samples=2)
    sqlite_store.write(lambda connection: batches.create(connection, request, "f", key_of(sqlite_store)))
    # the first is placed, and the node is full
    dispatcher._admit()
    assert dispatcher.is_due(ENDED, "b")
    dispatcher._admit()
    assert dispatcher.is_due(ENDED, "b")


def test_many_ended_rollouts_cause_a_limited_number_of_rounds(sqlite_store: Store) -> None:
    dispatcher = dispatcher_on(sqlite_store)
    dispatcher._admit()
    assert sum(dispatcher.is_due(ENDED, "b") for _ in range(1000)) == 10


@pytest.mark.parametrize(("took_s", "rest"), [(0.0, 0.02), (0.3, 0.3), (45.0, 0.5)])
def test_pause_is_as_long_as_the_round_and_at_most_a_tick(took_s: float, rest: float) -> None:
    assert rest_s(took_s, 0.5) == rest
