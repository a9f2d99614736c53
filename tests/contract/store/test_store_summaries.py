"""One-line summaries of the newest batches, on every kind of database."""

from __future__ import annotations

from typing import Any

import pytest

from farm.ids import RolloutRef
from farm.records.request import BatchRequest, Instance
from farm.records.rollout import BatchSummary, State
from farm.store import batches, cancel_and_rescore
from farm.store.database import Store
from farm.store.reports import summaries
from farm.store.rollouts import batches as table
from farm.store.rollouts import rollouts
from tests.secret_keys import key_of


def new_batch(store: Store, *sources: str, n_samples: int = 1, priority: int = 0) -> str:
    instances = tuple(Instance(data_source=source, fields={}) for source in sources)
    request = BatchRequest(instances=instances, n_samples=n_samples, priority=priority)
    return store.write(lambda connection: batches.create(connection, request, "", key_of(store)))[0]


def change(store: Store, rollout_id: str, **values: Any) -> None:
    statement = rollouts.update().where(rollouts.c.rollout_id == rollout_id).values(**values)
    store.write(lambda connection: connection.execute(statement) and None)


def newest(store: Store, limit: int = 10) -> list[BatchSummary]:
    return store.read(lambda connection: summaries.newest(connection, limit))


def test_empty_farm_has_no_summaries(store: Store) -> None:
    assert newest(store) == []


def test_summaries_are_newest_first_and_limited(store: Store) -> None:
    ids = [
        new_batch(store, "math", "code", "math", n_samples=2, priority=3),
        new_batch(store, "swe"),
        new_batch(store, "a"),
    ]
    statement = table.update().where(table.c.batch_id == ids[0]).values(created_at=1.0)
    store.write(lambda connection: connection.execute(statement) and None)
    result = newest(store)
    assert {each.batch_id for each in result[:2]} == {*ids[1:]}
    assert result[2].batch_id == ids[0]
    assert (result[2].n_rollouts, result[2].priority, result[2].data_sources) == (6, 3, ("code", "math"))
    assert result[2].age_s > 1e6
    assert result[2].mean_reward is None
    assert len(newest(store, 2)) == 2


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ([{}, {}], State.QUEUED),
        ([{"state": "active"}, {}], State.ACTIVE),
        ([{"stage": "run"}, {}], State.ACTIVE),
        ([{"attempt": 2}, {}], State.ACTIVE),
        ([{"state": "completed", "reward": 1.0}, {}], State.ACTIVE),
        ([{"state": "failed"}, {}], State.ACTIVE),
        ([{"state": "completed", "reward": 1.0}, {"state": "completed", "reward": 0.0}], State.COMPLETED),
        ([{"state": "completed", "reward": 1.0}, {"state": "failed"}], State.COMPLETED),
        ([{"state": "failed"}, {"state": "cancelled"}], State.FAILED),
    ],
)
def test_state_of_a_batch_follows_its_rollouts(store: Store, changes: list[dict[str, Any]], state: State) -> None:
    batch_id = new_batch(store, "noop", n_samples=2)
    for sample, values in enumerate(changes):
        if values:
            change(store, f"{batch_id}.0.{sample}", **values)
    (batch_summary,) = newest(store)
    assert batch_summary.state is state
    rewards = [values["reward"] for values in changes if "reward" in values]
    assert batch_summary.mean_reward == (sum(rewards) / len(rewards) if rewards else None)
    assert (batch_summary.n_completed, batch_summary.n_failed) == (
        len(rewards),
        sum(each.get("state") == "failed" for each in changes),
    )


def test_cancelled_batch_is_reported_as_cancelled(store: Store) -> None:
    batch_id = new_batch(store, "noop", n_samples=3)
    store.write(lambda connection: cancel_and_rescore.cancel(connection, RolloutRef(batch_id)))
    (batch_summary,) = newest(store)
    assert (batch_summary.state, batch_summary.n_cancelled) == (State.CANCELLED, 3)
