"""The store's handling of a node that drains, or returns after it was killed, on SQLite and on Postgres."""

from __future__ import annotations

from sqlalchemy import Connection, select

from farm.records.rollout import Failure, Outcome, Stage, State
from farm.store import batches, leases, placement, rollouts
from farm.store.database import Store
from farm.store.reports import audit
from farm.store.rollouts import Claim
from tests.contract.store.test_store import NODE, advance, announce, claim, claimed, new_batch, place, run_to_end

LEASE_S = 60.0
ENDED = {"policy_outcome": "submitted", "submission": {"answer": "42"}}


def node_with_one_of_each(store: Store) -> tuple[list[str], dict[str, Claim]]:
    """Return rollouts 0 to 5: ended, queued and active in init, queued and active in run, active in eval."""
    announce(store)
    batch_id = new_batch(store, n=6)
    place(store, batch_id)
    ids = [f"{batch_id}.{group}.0" for group in range(6)]
    run_to_end(store, ids[0])
    held = {ids[2]: claimed(store, ids[2], Stage.INIT)}
    for rollout_id in ids[3:]:
        assert advance(store, claimed(store, rollout_id, Stage.INIT))
    held[ids[4]] = claimed(store, ids[4], Stage.RUN)
    assert advance(store, claimed(store, ids[5], Stage.RUN), **ENDED)
    held[ids[5]] = claimed(store, ids[5], Stage.EVAL)
    return ids, held


def rows(store: Store) -> list[tuple[str, str, int, str | None, int, int]]:
    table = rollouts.rollouts.c
    columns = (table.stage, table.state, table.attempt, table.node, table.n_failures, table.n_lost)

    def found(connection: Connection) -> list[tuple[str, str, int, str | None, int, int]]:
        return list(connection.execute(select(*columns).order_by(table.group_index)).tuples())

    return store.read(found)


def test_only_unstarted_rollouts_are_requeued(store: Store) -> None:
    node_with_one_of_each(store)
    before = rows(store)
    assert store.write(lambda connection: placement.requeue_unstarted(connection, NODE)) == 1
    assert rows(store) == [*before[:1], ("init", "queued", 1, None, 0, 0), *before[2:]]
    assert store.write(lambda connection: placement.requeue_unstarted(connection, NODE)) == 0


def test_rollout_placed_in_run_is_requeued_until_it_has_begun(store: Store) -> None:
    announce(store)
    batch_id = new_batch(store, n=3)
    place(store, batch_id, in_run=True)
    assert rows(store) == [("run", "queued", 1, NODE, 0, 0)] * 3
    run_to_end(store, f"{batch_id}.0.0", in_run=True)
    assert claim(store, f"{batch_id}.1.0", Stage.INIT) is None, "it waits for no sandbox"
    held = claimed(store, f"{batch_id}.1.0", Stage.RUN)
    before = rows(store)
    assert store.write(lambda connection: placement.requeue_unstarted(connection, NODE)) == 1
    assert rows(store) == [*before[:2], ("init", "queued", 1, None, 0, 0)]
    assert store.read(lambda connection: audit.violations(connection, batch_id)) == []
    assert store.write(lambda connection: placement.requeue_of_predecessor(connection, NODE)) == 1
    lost = Failure(Outcome.LOST, "gone")
    assert store.write(lambda connection: rollouts.requeue(connection, held, lost, {}))
    assert rows(store)[1] == ("init", "queued", 2, None, 0, 0), "the next attempt goes the long way"
    assert store.read(lambda connection: audit.violations(connection, batch_id)) == []


def test_requeue_of_all_counts_as_no_failure(store: Store) -> None:
    _, held = node_with_one_of_each(store)
    before = rows(store)
    assert store.write(lambda connection: placement.requeue_all(connection, "another")) == 0
    assert rows(store) == before
    assert store.write(lambda connection: placement.requeue_all(connection, NODE)) == 5
    again = ("init", "queued", 2, None, 0, 0)
    assert rows(store) == [before[0], again, again, again, again, ("eval", "queued", 2, None, 0, 0)]
    # a node that was considered lost writes nothing when it returns
    assert not any(advance(store, each) for each in held.values() if each.stage is not Stage.EVAL)
    timings = {each: store.read(lambda connection, of=each: batches.timings(connection, of)) for each in held}  # type: ignore[misc]
    assert [result[-1].result for result in timings.values()] == ["drained"] * 3
    assert all(timing.finished_at is not None for result in timings.values() for timing in result)
    assert store.write(lambda connection: placement.requeue_all(connection, NODE)) == 0


def test_restart_of_a_killed_node_requeues_its_queued_rollouts(store: Store) -> None:
    _, held = node_with_one_of_each(store)
    before = rows(store)
    assert store.write(lambda connection: placement.requeue_of_predecessor(connection, NODE)) == 5
    after = rows(store)
    assert [row[1] for row in after] == [row[1] for row in before], "what was active is for the dispatcher to take back"
    assert [(row[0], row[2], row[3]) for row in after if row[1] == State.QUEUED] == [("init", 2, None)] * 2
    expired = store.read(lambda connection: leases.expired(connection, 10))
    assert {each.rollout_id for each in expired} == held.keys()
