"""A rollout takes a known number of statements and commits, and single statements work under contention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from sqlalchemy import event, text

from farm.ids import RolloutRef
from farm.records.rollout import Stage
from farm.store import cancel_and_rescore, leases
from farm.store.database import Store
from farm.store.sql.database_sessions import open_transactions
from tests.contract.store.test_store import advance, claimed, finish, new_batch, place, run_to_end, status
from tests.services.farms import until

PER_ROLLOUT = {
    ("sqlite", False): {"statements": 14, "commits": 6},
    ("postgresql", False): {"statements": 6, "commits": 6},
    ("sqlite", True): {"statements": 10, "commits": 4},
    ("postgresql", True): {"statements": 4, "commits": 4},
}
"""Statements of claims, advances and the finish without grouping, by database and whether init is left out.

Each commit belongs to a transaction with a begin.
"""


@contextmanager
def counted(store: Store) -> Iterator[Counter[str]]:
    result = Counter[str]()

    def executed(connection: object, cursor: object, statement: str, *rest: object) -> None:
        result["statements"] += not statement.startswith("BEGIN")

    def committed(connection: object) -> None:
        result["commits"] += 1

    event.listen(store.engine, "before_cursor_execute", executed)
    event.listen(store.engine, "commit", committed)
    yield result
    event.remove(store.engine, "before_cursor_execute", executed)
    event.remove(store.engine, "commit", committed)


@pytest.mark.parametrize("in_run", [False, True])
def test_empty_rollout_takes_a_known_number_of_statements(store: Store, in_run: bool) -> None:
    batch_id = new_batch(store, 2)
    place(store, batch_id, in_run=in_run)
    run_to_end(store, f"{batch_id}.0.0", in_run=in_run)
    with counted(store) as result:
        run_to_end(store, f"{batch_id}.1.0", in_run=in_run)
    assert result == PER_ROLLOUT[store.engine.dialect.name, in_run]


@pytest.mark.parametrize("changed", ["renewed", "cancelled"])
def test_finish_that_waits_for_a_row_lock_sees_the_new_state(postgres_store: Store, changed: str) -> None:
    store = postgres_store
    batch_id = new_batch(store, 2)
    place(store, batch_id)
    rollout_id = f"{batch_id}.0.0"
    advance(store, claimed(store, rollout_id, Stage.INIT))
    advance(store, claimed(store, rollout_id, Stage.RUN), policy_outcome="submitted", submission={})
    held = claimed(store, rollout_id, Stage.EVAL)

    def waits() -> bool:
        locked = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
        return bool(store.read(lambda connection: connection.execute(locked).scalar_one()))

    with ThreadPoolExecutor(1) as threads:
        with store.engine.begin() as connection:
            if changed == "renewed":
                assert leases.renew(connection, held.owner, [rollout_id], 60.0) == {rollout_id}
            else:
                assert cancel_and_rescore.cancel(connection, RolloutRef.of(rollout_id)) == [rollout_id]
            finishing = threads.submit(finish, store, held)
            until(waits, "the finish waits", 30.0)
        assert finishing.result(30) is (changed == "renewed")
    assert not list(store.read(lambda connection: list(open_transactions(connection))))
    after = status(store, batch_id)
    assert (after.n_finished, after.n_completed) == (1, int(changed == "renewed"))
    run_to_end(store, f"{batch_id}.1.0")
    assert status(store, batch_id).n_finished == 2, "no number is left out, and none given twice"
    numbers = text("SELECT finish_seq FROM rollouts ORDER BY finish_seq")
    assert store.read(lambda connection: list(connection.execute(numbers).scalars())) == [1, 2]
