"""The audit of a batch: no violations after any transitions, and a violation for each broken invariant."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Connection, delete, event, insert, update

from farm.errors import NotFound
from farm.ids import RolloutRef
from farm.records.rollout import Count, Stage
from farm.records.trajectory import segments, token_ids
from farm.scheduler.background_work import InvariantChecker
from farm.store import cancel_and_rescore, rollouts, trajectories
from farm.store.database import Store
from farm.store.reports import audit
from farm.store.rollouts import attempts, batches, rewards
from farm.store.sql.schema import DeliveryRow, SegmentRow
from tests.contract.store.test_store import advance, claimed, fail, finish, new_batch, place, run_to_end
from tests.services.farms import until
from tests.services.model_calls import model_call

ROW = rollouts.rollouts


def violations_of(store: Store, batch_id: str) -> list[str]:
    return [violation.what for violation in store.read(lambda connection: audit.violations(connection, batch_id))]


def one_of_each(store: Store) -> str:
    """Write ten groups of two, with a rollout in each possible state; `.0.0` is completed, with a row."""
    batch_id = new_batch(store, 10, 2, max_attempts=2)
    place(store, batch_id)
    _run_with_a_row(store, batch_id)
    claimed(store, f"{batch_id}.1.0", Stage.INIT)
    held = claimed(store, f"{batch_id}.2.0", Stage.INIT)
    assert fail(store, held, retry_in_s=0.0)
    assert fail(store, claimed(store, f"{batch_id}.3.0", Stage.INIT), retry_in_s=None)
    store.write(lambda connection: cancel_and_rescore.cancel(connection, RolloutRef(batch_id), [f"{batch_id}.4.0"]))
    assert advance(store, claimed(store, f"{batch_id}.5.0", Stage.INIT))
    assert advance(store, claimed(store, f"{batch_id}.6.0", Stage.INIT))
    claimed(store, f"{batch_id}.6.0", Stage.RUN)
    run_to_end(store, f"{batch_id}.7.0")
    store.write(lambda connection: cancel_and_rescore.rescore(connection, RolloutRef(batch_id), [f"{batch_id}.7.0"]))
    run_to_end(store, f"{batch_id}.8.0")
    store.write(lambda connection: cancel_and_rescore.rescore(connection, RolloutRef(batch_id), [f"{batch_id}.8.0"]))
    place(store, batch_id)
    assert finish(store, claimed(store, f"{batch_id}.8.0", Stage.EVAL, 2), 0.5)
    return batch_id


def _run_with_a_row(store: Store, batch_id: str) -> None:
    rollout_id = f"{batch_id}.0.0"
    assert advance(store, claimed(store, rollout_id, Stage.INIT))
    held = claimed(store, rollout_id, Stage.RUN)
    call = model_call()
    call.prompt_ids, call.response_ids = token_ids([1]), token_ids([2])
    call.response_logprobs = call.response_ids.astype("float32")
    store.write(lambda connection: trajectories.store_segments(connection, rollout_id, batch_id, 1, segments([call])))
    assert advance(store, held, policy_outcome="submitted", submission={"answer": "42"}, n_segments=1)
    assert finish(store, claimed(store, rollout_id, Stage.EVAL))


def test_valid_states_have_no_violation(store: Store) -> None:
    batch_id = one_of_each(store)
    assert violations_of(store, batch_id) == []
    numbers = store.read(lambda connection: audit.conservation(connection, batch_id))
    assert numbers.batch == Count(batch_id, 20, 2, 1, 1, 16)
    assert numbers.groups[4] == Count(f"{batch_id}.4", 2, 0, 0, 1, 1)
    assert numbers.off == ()
    assert store.read(audit.open_batches) == [batch_id]


def test_unknown_batch_is_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        violations_of(store, "b0")


BROKEN: list[tuple[str, int, dict[str, Any], str]] = [
    ("no state", 1, {"state": "gone"}, "its state or its stage is unknown"),
    ("no number", 0, {"finish_seq": None}, "without number"),
    ("no outcome", 3, {"outcome": None}, "without number"),
    ("a reward too early", 5, {"reward": 1.0}, "not completed, but has a reward"),
    ("a number too early", 5, {"finish_seq": 1}, "has not ended, but has"),
    ("a number nobody gave", 0, {"finish_seq": 1000}, "never assigned"),
    ("no reward", 0, {"reward": None}, "completed without a reward"),
    ("another reward", 0, {"reward": 0.25}, "not its newest score"),
    ("no number as reward", 0, {"reward": float("inf")}, "is not finite"),
    ("a fault is scored", 0, {"outcome": "lost"}, "its outcome is not one of the policy"),
    ("a fault is kept", 0, {"failure_kind": "lost"}, "completed, but not scored"),
    ("a failure is worth something", 3, {"reward": 0.0}, "not completed, but has a reward"),
    ("a score is thrown away", 0, {"state": "cancelled", "outcome": "cancelled", "reward": None}, "without a score"),
    ("a score is failed", 0, {"state": "failed", "outcome": "lost", "failure_kind": "lost"}, "without a score"),
    ("a fault without a name", 3, {"failure_kind": None}, "without a known kind of failure"),
    (
        "the policy's doing as a fault",
        3,
        {"failure_kind": "submitted", "outcome": "submitted"},
        "without a known kind of failure",
    ),
    ("half cancelled", 4, {"outcome": "lost"}, "disagree on whether it is cancelled"),
    ("an active one of nobody", 1, {"owner": None}, "active without owner"),
    ("a queued one of somebody", 5, {"owner": "w"}, "not active, but has an owner"),
    ("another's attempt", 1, {"owner": "x"}, "does not have the only open attempt"),
    ("queued under way", 1, {"state": "queued", "owner": None, "lease_expires_at": None}, "has an open attempt"),
    ("the past again", 2, {"attempt": 0}, "an attempt after its last"),
    ("too many failures", 2, {"n_failures": 3}, "more often than its batch allows"),
    ("too many losses", 2, {"n_lost": 12}, "more often than its batch allows"),
    ("less than none", 2, {"n_failures": -1}, "a negative count"),
    ("no sandbox", 5, {"node": None}, "but has no node"),
    ("scored without a run", 5, {"stage": "eval"}, "exactly one completed run"),
    ("not run, with an outcome", 5, {"policy_outcome": "submitted"}, "results of a run, but no completed run"),
    ("rows that are not there", 5, {"n_segments": 1}, "number of training rows differs"),
]


@pytest.mark.parametrize(("group", "values", "what"), [each[1:] for each in BROKEN], ids=[each[0] for each in BROKEN])
def test_violation_of_a_rollout_is_found(sqlite_audited: tuple[Store, str], group: int, values: Any, what: str) -> None:
    store, batch_id = sqlite_audited
    rollout_id = f"{batch_id}.{group}.0"
    store.write(lambda connection: connection.execute(update(ROW).where(ROW.c.rollout_id == rollout_id).values(values)))
    result = store.read(lambda connection: audit.violations(connection, batch_id))
    assert any(each.id == rollout_id and what in each.what for each in result), result


@pytest.fixture
def sqlite_audited(sqlite_store: Store) -> tuple[Store, str]:
    return sqlite_store, one_of_each(sqlite_store)


def test_violations_in_other_tables_are_found(store: Store) -> None:
    batch_id = one_of_each(store)
    done = f"{batch_id}.0.0"
    rows, deliveries = SegmentRow.__table__, DeliveryRow.__table__
    score = {"rollout_id": done, "attempt": 2, "value": 1.0, "details": {}, "evaluator": "x", "created_at": 0.0}
    read = {"batch_id": batch_id, "consumer": "trainer", "cursor": 99, "acknowledged_at": 0.0}
    faults: list[tuple[Any, str]] = [
        (update(rows).where(rows.c.rollout_id == done).values(attempt=7), "an attempt that does not count"),
        (delete(rows).where(rows.c.rollout_id == done), "number of training rows differs"),
        (insert(rewards).values(score), "scoring attempts do not match"),
        (update(attempts).where(attempts.c.rollout_id == done).values(finished_at=None), "has an open attempt"),
        (delete(ROW).where(ROW.c.rollout_id == f"{batch_id}.9.1"), "2 rollouts were submitted, 1 are there"),
        (update(ROW).where(ROW.c.finish_seq == 2).values(finish_seq=1), "2 rollouts ended as number 1"),
        (insert(deliveries).values(read), "trainer has acknowledged 99"),
        (update(batches).values(n_rollouts=21), "21 rollouts were submitted, 19 are there"),
    ]
    for statement, what in faults:
        assert not any(what in each for each in violations_of(store, batch_id))
        store.write(lambda connection, statement=statement: connection.execute(statement))  # type: ignore[misc]
        assert any(what in each for each in violations_of(store, batch_id)), (what, violations_of(store, batch_id))


def test_running_rollouts_cause_no_false_alarm(store: Store) -> None:
    batch_id = new_batch(store, 30, 2)
    place(store, batch_id)
    ended = threading.Event()
    ids = [f"{batch_id}.{group}.{sample}" for group in range(30) for sample in range(2)]

    def audit_on() -> list[str]:
        result: list[str] = []
        while not ended.is_set() and not result:
            result = violations_of(store, batch_id)
        return result

    with ThreadPoolExecutor(9) as threads:
        audited = threads.submit(audit_on)
        list(threads.map(lambda rollout_id: run_to_end(store, rollout_id), ids))
        ended.set()
    assert audited.result() == []


def test_each_violation_is_reported_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    first, second = new_batch(store), new_batch(store)
    invariant_checker = InvariantChecker(store, period_s=0.0)
    assert [invariant_checker.look() for _ in range(2)] == [[], []]
    store.write(lambda connection: connection.execute(update(ROW).where(ROW.c.batch_id == second).values(reward=1.0)))
    result = [violation for _ in range(6) for violation in invariant_checker.look()]
    assert [violation.id for violation in result] == [f"{second}.0.0"]
    assert [record.message.startswith("ALARM ") for record in caplog.records if record.levelname == "ERROR"] == [True]
    store.write(lambda connection: cancel_and_rescore.cancel(connection, RolloutRef(first), None))
    assert store.read(audit.open_batches) == [first, second], "what ended a moment ago is still looked at"
    long_ago = update(ROW).where(ROW.c.batch_id == first).values(finished_at=1.0)
    store.write(lambda connection: connection.execute(long_ago))
    assert store.read(audit.open_batches) == [second]


def test_unchecked_batches_are_checked_first(store: Store) -> None:
    new_batch(store), new_batch(store)
    invariant_checker = InvariantChecker(store, period_s=0.0)
    assert invariant_checker.look() == []
    late = new_batch(store)
    store.write(lambda connection: connection.execute(update(ROW).where(ROW.c.batch_id == late).values(reward=1.0)))
    assert [violation.id for _ in range(2) for violation in invariant_checker.look()] == [f"{late}.0.0"]


def test_many_small_batches_are_checked_together(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(30):
        new_batch(store)
    store.write(lambda connection: connection.execute(update(ROW).values(reward=1.0)))
    invariant_checker = InvariantChecker(store, period_s=30.0)
    rounds = 0
    while sum(record.levelname == "ERROR" for record in caplog.records) < 30:
        invariant_checker.look_around()
        rounds += 1
    assert rounds < 30


def test_started_checker_runs_until_it_is_closed(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    invariant_checker = InvariantChecker(store, period_s=0.05)
    invariant_checker.start()
    for number in range(1, 3):
        new_batch(store)
        store.write(lambda connection: connection.execute(update(ROW).values(reward=1.0)))
        until(
            lambda number=number: sum(record.levelname == "ERROR" for record in caplog.records) == number,  # type: ignore[misc]
            "it was looked at",
        )
    invariant_checker.close()


def test_audit_cost_does_not_grow_with_ended_rollouts(postgres_store: Store) -> None:
    batch_id = one_of_each(postgres_store)

    def plan(connection: Connection) -> str:
        result = {"b_batch": batch_id, "b_first": 0, "b_end": 256, "b_limit": 10}

        @event.listens_for(connection, "before_cursor_execute", retval=True)
        def explain(conn: Any, cursor: Any, statement: str, *rest: Any) -> tuple[str, Any]:
            return f"EXPLAIN {statement}", rest[0]

        value: Any = connection.execute(audit._broken(), result)
        return "\n".join(line for (line,) in value.cursor.fetchall())

    assert "hashed" not in postgres_store.read(plan), "a table is read whole, to look up each rollout of a batch"
