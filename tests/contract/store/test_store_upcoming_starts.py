"""The store's forecast of sandboxes to be started, on SQLite and on Postgres."""

from __future__ import annotations

import pytest

from farm.records.request import BatchRequest, Instance
from farm.records.rollout import Failure, Stage
from farm.store import batches, placement, rollouts
from farm.store.database import Store
from farm.store.placement import StageMessage, UpcomingStart
from farm.store.rollouts import Claim, RunSummary
from tests.secret_keys import key_of

NODE = "n1"


@pytest.fixture
def batch_id(store: Store) -> str:
    """Return a batch of three instances with two samples."""
    instances = tuple(Instance(data_source="noop", fields={"i": i}) for i in range(3))
    request = BatchRequest(instances=instances, n_samples=2)
    return store.write(lambda connection: batches.create(connection, request, "f", key_of(store)))[0]


def place(store: Store, batch_id: str, n: int, node: str = NODE) -> None:
    result = store.read(lambda connection: placement.next_of(connection, batch_id, n))
    stage_messages = [StageMessage(each.rollout_id, each.attempt, each.stage, node) for each in result]
    store.write(lambda connection: placement.place(connection, stage_messages, 3.0))


def assigned(store: Store) -> list[UpcomingStart]:
    return store.read(lambda connection: placement.assigned_starts(connection, NODE))


def following(store: Store, batch_id: str, limit: int) -> list[UpcomingStart]:
    return store.read(lambda connection: placement.next_groups_of(connection, batch_id, limit))


def test_upcoming_starts_are_grouped_in_order_of_placement(store: Store, batch_id: str) -> None:
    assert following(store, batch_id, 3) == [UpcomingStart(batch_id, 0, 2), UpcomingStart(batch_id, 1, 1)]
    place(store, batch_id, 3)
    assert following(store, batch_id, 100) == [UpcomingStart(batch_id, 1, 1), UpcomingStart(batch_id, 2, 2)]
    assert following(store, batch_id, 0) == following(store, "none", 9) == []


def test_assigned_starts_are_those_not_begun(store: Store, batch_id: str) -> None:
    assert assigned(store) == []
    place(store, batch_id, 3)
    place(store, batch_id, 1, "another")
    assert assigned(store) == [UpcomingStart(batch_id, 0, 2), UpcomingStart(batch_id, 1, 1)]
    held = claimed(store, batch_id, Stage.INIT)
    assert assigned(store) == [UpcomingStart(batch_id, 0, 1), UpcomingStart(batch_id, 1, 1)]
    advance(store, held, None)
    assert assigned(store) == [UpcomingStart(batch_id, 0, 1), UpcomingStart(batch_id, 1, 1)], (
        "the next stages have their sandbox"
    )


def test_rollouts_to_be_scored_are_no_upcoming_start(store: Store, batch_id: str) -> None:
    place(store, batch_id, 1)
    advance(store, claimed(store, batch_id, Stage.INIT), None)
    ended = RunSummary("submitted", {}, n_turns=1, n_response_tokens=1)
    advance(store, claimed(store, batch_id, Stage.RUN), ended)
    held = claimed(store, batch_id, Stage.EVAL)
    store.write(lambda connection: rollouts.requeue(connection, held, Failure("drained", "x"), {}))
    waiting = store.read(lambda connection: placement.next_of(connection, batch_id, 100))
    assert (f"{batch_id}.0.0", Stage.EVAL) in [(each.rollout_id, each.stage) for each in waiting]
    assert following(store, batch_id, 100)[0] == UpcomingStart(batch_id, 0, 1)


def claimed(store: Store, batch_id: str, stage: Stage) -> Claim:
    """Claim the batch's first rollout."""
    rollout_id = f"{batch_id}.0.0"
    held = store.write(lambda connection: rollouts.claim(connection, rollout_id, 1, stage, NODE, "w", 60.0))
    assert held
    return held


def advance(store: Store, held: Claim, summary: RunSummary | None) -> None:
    assert store.write(lambda connection: rollouts.advance(connection, held, 3.0, summary))
