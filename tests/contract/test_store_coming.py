"""What the store tells of the sandboxes that will be asked for, alike on SQLite and Postgres."""

from __future__ import annotations

from typing import Any

import pytest

from farm.request import BatchRequest, Instance
from farm.rollout import Failure, Stage
from farm.store import batches, placement, rollouts
from farm.store.engine import Store
from farm.store.placement import Bell, Coming
from farm.store.rollouts import Claim

NODE = "n1"


@pytest.fixture
def batch_id(store: Store) -> str:
    """Three instances of two samples."""
    instances = tuple(Instance(data_source="noop", fields={"i": i}) for i in range(3))
    request = BatchRequest(instances=instances, n_samples=2)
    return store.write(lambda connection: batches.create(connection, request, "f"))[0]


def place(store: Store, batch_id: str, n: int, node: str = NODE) -> None:
    found = store.read(lambda connection: placement.next_of(connection, batch_id, n))
    bells = [Bell(rollout_id, attempt, stage, node) for rollout_id, attempt, stage in found]
    store.write(lambda connection: placement.place(connection, bells, 3.0))


def rung(store: Store) -> list[Coming]:
    return store.read(lambda connection: placement.rung(connection, NODE))


def following(store: Store, batch_id: str, limit: int) -> list[Coming]:
    return store.read(lambda connection: placement.next_groups_of(connection, batch_id, limit))


def test_what_waits_is_told_by_group_in_the_order_it_is_placed(store: Store, batch_id: str) -> None:
    assert following(store, batch_id, 3) == [Coming(batch_id, 0, 2), Coming(batch_id, 1, 1)]
    place(store, batch_id, 3)
    assert following(store, batch_id, 100) == [Coming(batch_id, 1, 1), Coming(batch_id, 2, 2)]
    assert following(store, batch_id, 0) == following(store, "none", 9) == []


def test_what_a_node_was_given_and_has_not_begun(store: Store, batch_id: str) -> None:
    assert rung(store) == []
    place(store, batch_id, 3)
    place(store, batch_id, 1, "another")
    assert rung(store) == [Coming(batch_id, 0, 2), Coming(batch_id, 1, 1)]
    held = claimed(store, batch_id, Stage.INIT)
    assert rung(store) == [Coming(batch_id, 0, 1), Coming(batch_id, 1, 1)]
    advance(store, held, None)
    assert rung(store) == [Coming(batch_id, 0, 1), Coming(batch_id, 1, 1)], "the next stages have their sandbox"


def test_what_is_only_to_be_scored_is_not_told(store: Store, batch_id: str) -> None:
    place(store, batch_id, 1)
    advance(store, claimed(store, batch_id, Stage.INIT), None)
    ended = {"policy_outcome": "submitted", "submission": {}, "n_turns": 1, "n_response_tokens": 1}
    advance(store, claimed(store, batch_id, Stage.RUN), ended)
    held = claimed(store, batch_id, Stage.EVAL)
    store.write(lambda connection: rollouts.requeue(connection, held, Failure("drained", "x"), {}))
    waiting = store.read(lambda connection: placement.next_of(connection, batch_id, 100))
    assert (f"{batch_id}.0.0", Stage.EVAL) in [(rollout_id, stage) for rollout_id, _, stage in waiting]
    assert following(store, batch_id, 100)[0] == Coming(batch_id, 0, 1)


def claimed(store: Store, batch_id: str, stage: Stage) -> Claim:
    """The batch's first rollout."""
    rollout_id = f"{batch_id}.0.0"
    held = store.write(lambda connection: rollouts.claim(connection, rollout_id, 1, stage, NODE, "w", 60.0))
    assert held
    return held


def advance(store: Store, held: Claim, played: dict[str, Any] | None) -> None:
    assert store.write(lambda connection: rollouts.advance(connection, held, 3.0, played))
