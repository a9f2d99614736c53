"""Closing of cut off attempts: budgets, pauses, quarantine; and nodes that are taken out of service."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event, select, update

from farm.ids import RolloutRef
from farm.records.node import Node
from farm.records.rollout import Failure, Outcome, Rollout, Stage, State
from farm.retry_policy import AGENT_MISSING, DRAINED, RESTARTED, retry_decision
from farm.store import attempts, batches, cancel_and_rescore, nodes
from farm.store.attempts import AttemptEnd, RetrySettings
from farm.store.database import Store
from farm.store.rollouts import Claim, claim, rollouts
from farm.store.sql.clock import db_now
from tests.contract.store.test_store import advance, claimed, finish, new_batch, place
from tests.services.farms import until

PATIENCE = RetrySettings(retry_s=0.0, node_timeout_s=60.0)
NODE = "n1"


def end(
    store: Store, held: Claim, cause: str, message: str = "it broke", *, retryable: bool = True, retry_s: float = 0.0
) -> AttemptEnd | None:
    kind = Outcome.STALE if cause == RESTARTED else cause
    return store.write(
        partial(
            attempts.end_attempt,
            held=held,
            failure=Failure(kind, message),
            decision=retry_decision(cause, retryable),
            retry_settings=RetrySettings(retry_s, 60.0),
        )
    )


def rollout(store: Store, rollout_id: str) -> Rollout:
    return store.read(lambda connection: batches.rollout(connection, rollout_id))


def begun(store: Store, rollout_id: str) -> Claim:
    """Claim its init stage once more."""
    now = rollout(store, rollout_id)
    if now.node is None:
        place(store, now.batch_id)
    return claimed(store, rollout_id, Stage.INIT, now.attempt)


def up(store: Store, *names: str, room: int = 8) -> None:
    for name in names:
        node = Node(name, room, 4, 4, 4, ["noop"], {})
        store.write(partial(nodes.announce, node=node))


def known(store: Store) -> dict[str, Node]:
    return {node.node: node for node in store.read(nodes.listing)}


class TestBudgets:
    @pytest.mark.parametrize(
        ("cause", "n_attempts", "counts", "outcome"),
        [
            (Outcome.ENGINE_ERROR, 3, (3, 0, 0), Outcome.ENGINE_ERROR),
            (Outcome.LOST, 6, (0, 6, 0), Outcome.LOST),
            (RESTARTED, 4, (0, 0, 4), Outcome.STALE),
            (Outcome.STALE, 1, (0, 0, 0), Outcome.STALE),
        ],
    )
    def test_each_cause_is_counted_by_itself(
        self, store: Store, cause: str, n_attempts: int, counts: tuple[int, int, int], outcome: Outcome
    ) -> None:
        rollout_id = f"{new_batch(store, max_attempts=3, max_losses=5)}.0.0"
        for attempt in range(1, n_attempts + 1):
            ending = end(store, begun(store, rollout_id), cause)
            assert ending is not None
            assert (ending.again_in_s is None) == (attempt == n_attempts)
        result = rollout(store, rollout_id)
        assert (result.state, result.outcome, result.reward) == (State.FAILED, outcome, None)
        assert (result.n_failures, result.n_lost, result.n_restarts) == counts
        assert result.attempt == n_attempts

    def test_losses_leave_the_failures_alone(self, store: Store) -> None:
        rollout_id = f"{new_batch(store, max_attempts=2)}.0.0"
        for cause in (Outcome.LOST, Outcome.ENGINE_ERROR, Outcome.LOST, DRAINED, DRAINED):
            ending = end(store, begun(store, rollout_id), cause)
            assert ending is not None
            assert ending.again_in_s is not None
        result = rollout(store, rollout_id)
        assert (result.state, result.n_failures, result.n_lost) == (State.QUEUED, 1, 2)

    def test_what_cannot_help_ends_at_once(self, store: Store) -> None:
        rollout_id = f"{new_batch(store)}.0.0"
        ending = end(store, begun(store, rollout_id), Outcome.HANDLER_ERROR, retryable=False)
        assert ending == AttemptEnd(Failure(Outcome.HANDLER_ERROR, "it broke"), None)
        assert rollout(store, rollout_id).n_failures == 0

    def test_a_failed_attempt_waits(self, store: Store) -> None:
        rollout_id = f"{new_batch(store)}.0.0"
        ending = end(store, begun(store, rollout_id), Outcome.ENGINE_ERROR, retry_s=40.0)
        assert ending is not None
        assert ending.again_in_s is not None
        assert 20.0 <= ending.again_in_s <= 40.0
        ready = select((rollouts.c.ready_at - db_now()).label("left")).where(rollouts.c.rollout_id == rollout_id)
        assert 10.0 < store.read(lambda connection: connection.execute(ready).scalar_one()) <= 40.0

    def test_who_lost_the_claim_ends_nothing(self, store: Store) -> None:
        rollout_id = f"{new_batch(store)}.0.0"
        first = begun(store, rollout_id)
        assert end(store, first, Outcome.LOST) is not None
        second = begun(store, rollout_id)
        for cause in (Outcome.LOST, Outcome.HANDLER_ERROR, DRAINED):
            assert end(store, first, cause) is None
        result = rollout(store, rollout_id)
        assert (result.state, result.attempt, result.n_lost, result.n_failures) == (State.ACTIVE, second.attempt, 1, 0)

    def test_a_message_may_be_anything(self, store: Store) -> None:
        batch_id = new_batch(store, n=2, max_attempts=1)
        for index, message in enumerate(["nul \0 and half \ud800 a pair", "x" * 1_000_000]):
            rollout_id = f"{batch_id}.{index}.0"
            assert end(store, begun(store, rollout_id), Outcome.AGENT_ERROR, message) is not None
            failure = rollout(store, rollout_id).failure
            assert failure is not None
            assert len(failure.message) < 30_000


class TestQuarantine:
    def test_an_instance_that_always_fails_is_given_up_with_its_first_error(self, store: Store) -> None:
        batch_id = new_batch(store, n=2, n_samples=8, quarantine_after=4, max_attempts=3)
        for n, sample in enumerate((0, 1, 0)):
            ending = end(store, begun(store, f"{batch_id}.0.{sample}"), Outcome.SANDBOX_ERROR, f"error {n}")
            assert ending is not None
            assert ending.again_in_s is not None
        playing = begun(store, f"{batch_id}.0.7")
        ending = end(store, begun(store, f"{batch_id}.0.2"), Outcome.EVALUATOR_ERROR, "the last")
        assert ending is not None
        assert (ending.again_in_s, ending.n_quarantined) == (None, 6)
        result = [rollout(store, f"{batch_id}.0.{sample}") for sample in range(8)]
        assert [each.state for each in result] == [State.FAILED] * 7 + [State.ACTIVE]
        assert result[2].outcome == Outcome.EVALUATOR_ERROR
        assert {each.outcome for each in result if each.sample_index not in (2, 7)} == {Outcome.SANDBOX_ERROR}
        for each in result[:7]:
            assert each.failure is not None
            assert (
                f"instance {batch_id}.0 (noop) is in quarantine: 4 attempts at it failed on n1" in each.failure.message
            )
            assert "the first failed with sandbox_error: error 0" in each.failure.message
        assert sorted(each.cursor for each in result[:7]) == list(range(1, 8))
        assert rollout(store, f"{batch_id}.1.0").state is State.QUEUED, "the other instance is not touched"
        # a running sample is still scored
        assert advance(store, playing)
        run = claimed(store, f"{batch_id}.0.7", Stage.RUN)
        assert advance(store, run, policy_outcome="submitted", submission={})
        assert finish(store, claimed(store, f"{batch_id}.0.7", Stage.EVAL))
        assert rollout(store, f"{batch_id}.0.7").trainable

    @pytest.mark.parametrize("cause", [Outcome.SANDBOX_ERROR, Outcome.ENGINE_ERROR, Outcome.LOST, DRAINED])
    def test_what_was_being_played_gets_no_other_attempt(self, store: Store, cause: str) -> None:
        batch_id = new_batch(store, n_samples=3, quarantine_after=2)
        playing = begun(store, f"{batch_id}.0.2")
        for _ in range(2):
            end(store, begun(store, f"{batch_id}.0.0"), Outcome.AGENT_ERROR, "first")
        assert rollout(store, f"{batch_id}.0.1").state is State.FAILED
        ending = end(store, playing, cause)
        assert ending is not None
        assert ending.again_in_s is None
        result = rollout(store, f"{batch_id}.0.2")
        assert result.outcome == (cause if cause == Outcome.SANDBOX_ERROR else Outcome.AGENT_ERROR)

    def test_what_is_between_two_stages_is_played_on(self, store: Store) -> None:
        batch_id = new_batch(store, n_samples=4, quarantine_after=2)
        playing = begun(store, f"{batch_id}.0.3")
        assert advance(store, begun(store, f"{batch_id}.0.1"))
        assert advance(store, begun(store, f"{batch_id}.0.2"))
        run = claimed(store, f"{batch_id}.0.2", Stage.RUN)
        assert advance(store, run, policy_outcome="submitted", submission={})
        for _ in range(2):
            last = end(store, begun(store, f"{batch_id}.0.0"), Outcome.SANDBOX_ERROR)
        assert last is not None
        assert (last.again_in_s, last.n_quarantined) == (None, 0)
        result = [rollout(store, f"{batch_id}.0.{sample}") for sample in (1, 2)]
        assert [(each.state, each.stage) for each in result] == [(State.QUEUED, Stage.RUN), (State.QUEUED, Stage.EVAL)]
        assert finish(store, claimed(store, f"{batch_id}.0.2", Stage.EVAL))
        again = end(store, playing, Outcome.SANDBOX_ERROR)
        assert again is not None
        assert again.again_in_s is not None, "one was scored now"

    def test_what_is_scored_again_has_all_its_attempts_again(self, store: Store) -> None:
        batch_id = new_batch(store, n_samples=2, quarantine_after=2, max_attempts=2)
        for sample in range(2):
            assert advance(store, begun(store, f"{batch_id}.0.{sample}"))
            run = claimed(store, f"{batch_id}.0.{sample}", Stage.RUN)
            assert advance(store, run, policy_outcome="submitted", submission={})
        for sample, attempt in ((0, 1), (0, 2), (1, 1)):
            if attempt > 1:
                place(store, batch_id)
            end(store, claimed(store, f"{batch_id}.0.{sample}", Stage.EVAL, attempt), Outcome.EVALUATOR_ERROR)
        assert {rollout(store, f"{batch_id}.0.{sample}").state for sample in range(2)} == {State.FAILED}
        again = store.write(lambda connection: cancel_and_rescore.rescore(connection, RolloutRef(batch_id)))
        assert len(again) == 2
        place(store, batch_id)
        ending = end(store, claimed(store, f"{batch_id}.0.0", Stage.EVAL, 3), Outcome.EVALUATOR_ERROR)
        assert ending is not None
        assert ending.again_in_s is not None
        assert rollout(store, f"{batch_id}.0.1").state is State.QUEUED

    def test_what_is_claimed_at_that_moment_is_not_among_those_given_up(self, postgres_store: Store) -> None:
        store = postgres_store
        batch_id = new_batch(store, n_samples=3, quarantine_after=2)
        for _ in range(2):
            last = begun(store, f"{batch_id}.0.0")
            if last.attempt == 1:
                end(store, last, Outcome.SANDBOX_ERROR)
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        with store.engine.begin() as another, ThreadPoolExecutor(1) as threads:
            assert claim(another, f"{batch_id}.0.1", 1, Stage.INIT, NODE, "another", 60.0) is not None
            ending = threads.submit(end, store, last, Outcome.SANDBOX_ERROR)
            until(lambda: store.read(lambda connection: connection.exec_driver_sql(waits).scalar()), "it is waited for")
            another.commit()
            attempt_end = ending.result(60)
        assert attempt_end is not None
        assert attempt_end.n_quarantined == 1
        assert [rollout(store, f"{batch_id}.0.{sample}").state for sample in range(3)] == [
            State.FAILED,
            State.ACTIVE,
            State.FAILED,
        ]
        seq = store.read(lambda connection: connection.exec_driver_sql("SELECT last_seq FROM batches").scalar())
        assert seq == 2, "no number is left out"

    @pytest.mark.parametrize(
        ("causes", "after"),
        [
            ([Outcome.ENGINE_ERROR] * 3, 2),
            ([Outcome.LOST] * 6, 2),
            ([AGENT_MISSING] * 6, 2),
            ([Outcome.AGENT_ERROR] * 3, 4),
            ([Outcome.AGENT_ERROR] * 6, 0),
        ],
    )
    def test_other_causes_and_too_few_failures_are_no_reason(
        self, store: Store, causes: list[Outcome], after: int
    ) -> None:
        batch_id = new_batch(store, n_samples=2, quarantine_after=after, max_attempts=10)
        for cause in causes:
            end(store, begun(store, f"{batch_id}.0.0"), cause)
        assert rollout(store, f"{batch_id}.0.0").state is State.QUEUED

    def test_one_moment_in_which_all_samples_fail_is_no_reason(self, store: Store) -> None:
        batch_id = new_batch(store, n_samples=8, quarantine_after=6)
        held = [begun(store, f"{batch_id}.0.{sample}") for sample in range(8)]
        for each in held:
            ending = end(store, each, Outcome.SANDBOX_ERROR)
            assert ending is not None
            assert ending.again_in_s is not None

    def test_one_sample_that_was_scored_is_enough_to_go_on(self, store: Store) -> None:
        batch_id = new_batch(store, n_samples=3, quarantine_after=2, max_attempts=9)
        init = begun(store, f"{batch_id}.0.0")
        assert advance(store, init)
        run = claimed(store, f"{batch_id}.0.0", Stage.RUN)
        assert advance(store, run, policy_outcome="submitted", submission={})
        assert finish(store, claimed(store, f"{batch_id}.0.0", Stage.EVAL))
        for _ in range(5):
            end(store, begun(store, f"{batch_id}.0.1"), Outcome.SANDBOX_ERROR)
        assert rollout(store, f"{batch_id}.0.2").state is not State.FAILED

    def test_where_there_are_two_nodes_both_must_have_failed(self, store: Store) -> None:
        up(store, "n1", "n2")
        batch_id = new_batch(store, n_samples=2, quarantine_after=2, max_attempts=9)
        for _ in range(4):
            end(store, begun(store, f"{batch_id}.0.0"), Outcome.SANDBOX_ERROR)
        assert rollout(store, f"{batch_id}.0.1").state is not State.FAILED
        store.write(partial(nodes.drain, node="n2"))
        end(store, begun(store, f"{batch_id}.0.0"), Outcome.SANDBOX_ERROR)
        assert rollout(store, f"{batch_id}.0.1").state is State.FAILED

    def test_a_rollout_that_ends_as_it_should_asks_nothing_of_it(self, store: Store) -> None:
        batch_id = new_batch(store, quarantine_after=1)
        place(store, batch_id)
        result: list[str] = []
        event.listen(store.engine, "before_cursor_execute", lambda *call: result.append(call[2]))
        init = claimed(store, f"{batch_id}.0.0", Stage.INIT)
        advance(store, init)
        advance(store, claimed(store, f"{batch_id}.0.0", Stage.RUN), policy_outcome="submitted", submission={})
        finish(store, claimed(store, f"{batch_id}.0.0", Stage.EVAL))
        words = [
            statement.split()[0]
            for statement in result
            if not statement.startswith(("BEGIN", "PRAGMA", "SELECT set_config"))
        ]
        one_by_one = ["UPDATE", "INSERT", "UPDATE", "UPDATE"] * 2 + [
            "UPDATE",
            "INSERT",
            "UPDATE",
            "UPDATE",
            "INSERT",
            "UPDATE",
        ]
        assert words == (["WITH"] * 6 if store.engine.dialect.name == "postgresql" else one_by_one)


class TestNodeCircuitBreaker:
    def trip(self, store: Store, node: str, why: str = "init: why") -> float | None:
        return store.write(partial(nodes.open_breaker, node=node, why=why, node_timeout_s=60.0))

    def over(self, store: Store, node: str) -> None:
        """Let its time out of service end."""
        table: Any = nodes.nodes
        store.write(
            lambda connection: connection.execute(
                update(table).where(table.c.node == node).values(out_of_service_until=1.0)
            )
        )

    def test_it_takes_nothing_then_little_then_all(self, store: Store) -> None:
        up(store, "n1", "n2")
        assert self.trip(store, "n1") == 30.0
        result = known(store)
        assert (result["n1"].takes, result["n2"].takes, result["n1"].out_of_service_why) == (0, 8, "init: why")
        assert 20.0 < result["n1"].out_of_service_s <= 30.0
        assert not store.write(partial(nodes.close_breaker, node="n1", why="init: why")), "it is still out"
        self.over(store, "n1")
        assert known(store)["n1"].takes == 2
        assert not store.write(partial(nodes.close_breaker, node="n1", why="run: another")), (
            "its own stage has to go well"
        )
        assert store.write(partial(nodes.close_breaker, node="n1", why="init: why"))
        assert (known(store)["n1"].takes, known(store)["n1"].n_trips) == (8, 0)

    def test_it_is_out_for_longer_each_time(self, store: Store) -> None:
        up(store, "n1", "n2")
        result = []
        for _ in range(7):
            result.append(self.trip(store, "n1"))
            self.over(store, "n1")
        assert result == [30, 60, 120, 240, 480, 600, 600]

    def test_one_that_is_out_is_not_taken_out_again(self, store: Store) -> None:
        up(store, "n1", "n2")
        assert self.trip(store, "n1")
        assert self.trip(store, "n1", "run: another") == 0.0
        assert known(store)["n1"].n_trips == 1

    def test_who_asks_again_for_want_of_an_answer_is_told_what_it_did(self, store: Store) -> None:
        up(store, "n1", "n2")
        why = "init: a\0b" + "x" * 100_000
        self.trip(store, "n1", why)
        again = self.trip(store, "n1", why)
        assert again is not None
        assert 20.0 < again <= 30.0
        assert known(store)["n1"].n_trips == 1
        why = known(store)["n1"].out_of_service_why
        self.over(store, "n1")
        assert [store.write(partial(nodes.close_breaker, node="n1", why=why)) for _ in range(2)] == [True, True]

    def test_the_last_that_is_well_is_never_taken_out(self, store: Store) -> None:
        up(store, "n1", "n2", "n3")
        store.write(partial(nodes.drain, node="n3"))
        assert self.trip(store, "n1")
        assert self.trip(store, "n2") is None
        assert known(store)["n2"].takes == 8

    def test_a_new_supervisor_does_not_make_it_well(self, store: Store) -> None:
        up(store, "n1", "n2")
        self.trip(store, "n1")
        up(store, "n1")
        node = known(store)["n1"]
        assert (node.takes, node.n_trips, node.out_of_service_why) == (0, 1, "init: why")
        assert store.read(partial(nodes.breaker_reason, node="n1")) == "init: why"
        assert store.read(partial(nodes.breaker_reason, node="n2")) == ""
