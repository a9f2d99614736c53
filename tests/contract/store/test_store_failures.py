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


def claim_init(store: Store, rollout_id: str) -> Claim:
    """Claim its init stage once more."""
    now = rollout(store, rollout_id)
    if now.node is None:
        place(store, now.batch_id)
    return claimed(store, rollout_id, Stage.INIT, now.attempt)


def announce_nodes(store: Store, *names: str, room: int = 8) -> None:
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
    def test_each_cause_has_its_own_budget(
        self, store: Store, cause: str, n_attempts: int, counts: tuple[int, int, int], outcome: Outcome
    ) -> None:
        rollout_id = f"{new_batch(store, max_attempts=3, max_losses=5)}.0.0"
        for attempt in range(1, n_attempts + 1):
            ending = end(store, claim_init(store, rollout_id), cause)
            assert ending is not None
            assert (ending.again_in_s is None) == (attempt == n_attempts)
        result = rollout(store, rollout_id)
        assert (result.state, result.outcome, result.reward) == (State.FAILED, outcome, None)
        assert (result.n_failures, result.n_lost, result.n_restarts) == counts
        assert result.attempt == n_attempts

    def test_losses_do_not_count_as_failures(self, store: Store) -> None:
        rollout_id = f"{new_batch(store, max_attempts=2)}.0.0"
        for cause in (Outcome.LOST, Outcome.ENGINE_ERROR, Outcome.LOST, DRAINED, DRAINED):
            ending = end(store, claim_init(store, rollout_id), cause)
            assert ending is not None
            assert ending.again_in_s is not None
        result = rollout(store, rollout_id)
        assert (result.state, result.n_failures, result.n_lost) == (State.QUEUED, 1, 2)

    def test_permanent_failure_ends_at_once(self, store: Store) -> None:
        rollout_id = f"{new_batch(store)}.0.0"
        ending = end(store, claim_init(store, rollout_id), Outcome.HANDLER_ERROR, retryable=False)
        assert ending == AttemptEnd(Failure(Outcome.HANDLER_ERROR, "it broke"), None)
        assert rollout(store, rollout_id).n_failures == 0

    def test_retry_is_delayed(self, store: Store) -> None:
        rollout_id = f"{new_batch(store)}.0.0"
        ending = end(store, claim_init(store, rollout_id), Outcome.ENGINE_ERROR, retry_s=40.0)
        assert ending is not None
        assert ending.again_in_s is not None
        assert 20.0 <= ending.again_in_s <= 40.0
        ready = select((rollouts.c.ready_at - db_now()).label("left")).where(rollouts.c.rollout_id == rollout_id)
        assert 10.0 < store.read(lambda connection: connection.execute(ready).scalar_one()) <= 40.0

    def test_lost_claim_ends_nothing(self, store: Store) -> None:
        rollout_id = f"{new_batch(store)}.0.0"
        first = claim_init(store, rollout_id)
        assert end(store, first, Outcome.LOST) is not None
        second = claim_init(store, rollout_id)
        for cause in (Outcome.LOST, Outcome.HANDLER_ERROR, DRAINED):
            assert end(store, first, cause) is None
        result = rollout(store, rollout_id)
        assert (result.state, result.attempt, result.n_lost, result.n_failures) == (State.ACTIVE, second.attempt, 1, 0)

    def test_any_failure_message_is_stored(self, store: Store) -> None:
        batch_id = new_batch(store, n=2, max_attempts=1)
        for index, message in enumerate(["nul \0 and half \ud800 a pair", "x" * 1_000_000]):
            rollout_id = f"{batch_id}.{index}.0"
            assert end(store, claim_init(store, rollout_id), Outcome.AGENT_ERROR, message) is not None
            failure = rollout(store, rollout_id).failure
            assert failure is not None
            assert len(failure.message) < 30_000


class TestQuarantine:
    def test_failing_instance_is_quarantined_with_its_first_error(self, store: Store) -> None:
        batch_id = new_batch(store, n=2, n_samples=8, quarantine_after=4, max_attempts=3)
        for n, sample in enumerate((0, 1, 0)):
            ending = end(store, claim_init(store, f"{batch_id}.0.{sample}"), Outcome.SANDBOX_ERROR, f"error {n}")
            assert ending is not None
            assert ending.again_in_s is not None
        held = claim_init(store, f"{batch_id}.0.7")
        ending = end(store, claim_init(store, f"{batch_id}.0.2"), Outcome.EVALUATOR_ERROR, "the last")
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
        assert advance(store, held)
        run = claimed(store, f"{batch_id}.0.7", Stage.RUN)
        assert advance(store, run, policy_outcome="submitted", submission={})
        assert finish(store, claimed(store, f"{batch_id}.0.7", Stage.EVAL))
        assert rollout(store, f"{batch_id}.0.7").trainable

    @pytest.mark.parametrize("cause", [Outcome.SANDBOX_ERROR, Outcome.ENGINE_ERROR, Outcome.LOST, DRAINED])
    def test_active_rollout_of_a_quarantined_instance_gets_no_retry(self, store: Store, cause: str) -> None:
        batch_id = new_batch(store, n_samples=3, quarantine_after=2)
        held = claim_init(store, f"{batch_id}.0.2")
        for _ in range(2):
            end(store, claim_init(store, f"{batch_id}.0.0"), Outcome.AGENT_ERROR, "first")
        assert rollout(store, f"{batch_id}.0.1").state is State.FAILED
        ending = end(store, held, cause)
        assert ending is not None
        assert ending.again_in_s is None
        result = rollout(store, f"{batch_id}.0.2")
        assert result.outcome == (cause if cause == Outcome.SANDBOX_ERROR else Outcome.AGENT_ERROR)

    def test_rollout_between_stages_survives_quarantine(self, store: Store) -> None:
        batch_id = new_batch(store, n_samples=4, quarantine_after=2)
        held = claim_init(store, f"{batch_id}.0.3")
        assert advance(store, claim_init(store, f"{batch_id}.0.1"))
        assert advance(store, claim_init(store, f"{batch_id}.0.2"))
        run = claimed(store, f"{batch_id}.0.2", Stage.RUN)
        assert advance(store, run, policy_outcome="submitted", submission={})
        for _ in range(2):
            last = end(store, claim_init(store, f"{batch_id}.0.0"), Outcome.SANDBOX_ERROR)
        assert last is not None
        assert (last.again_in_s, last.n_quarantined) == (None, 0)
        result = [rollout(store, f"{batch_id}.0.{sample}") for sample in (1, 2)]
        assert [(each.state, each.stage) for each in result] == [(State.QUEUED, Stage.RUN), (State.QUEUED, Stage.EVAL)]
        assert finish(store, claimed(store, f"{batch_id}.0.2", Stage.EVAL))
        again = end(store, held, Outcome.SANDBOX_ERROR)
        assert again is not None
        assert again.again_in_s is not None, "one was scored now"

    def test_rescored_rollouts_regain_all_attempts(self, store: Store) -> None:
        batch_id = new_batch(store, n_samples=2, quarantine_after=2, max_attempts=2)
        for sample in range(2):
            assert advance(store, claim_init(store, f"{batch_id}.0.{sample}"))
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

    def test_rollout_claimed_during_quarantine_is_not_failed(self, postgres_store: Store) -> None:
        store = postgres_store
        batch_id = new_batch(store, n_samples=3, quarantine_after=2)
        for _ in range(2):
            last = claim_init(store, f"{batch_id}.0.0")
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
    def test_other_causes_and_few_failures_do_not_quarantine(
        self, store: Store, causes: list[Outcome], after: int
    ) -> None:
        batch_id = new_batch(store, n_samples=2, quarantine_after=after, max_attempts=10)
        for cause in causes:
            end(store, claim_init(store, f"{batch_id}.0.0"), cause)
        assert rollout(store, f"{batch_id}.0.0").state is State.QUEUED

    def test_simultaneous_failure_of_all_samples_does_not_quarantine(self, store: Store) -> None:
        batch_id = new_batch(store, n_samples=8, quarantine_after=6)
        held = [claim_init(store, f"{batch_id}.0.{sample}") for sample in range(8)]
        for each in held:
            ending = end(store, each, Outcome.SANDBOX_ERROR)
            assert ending is not None
            assert ending.again_in_s is not None

    def test_one_scored_sample_prevents_quarantine(self, store: Store) -> None:
        batch_id = new_batch(store, n_samples=3, quarantine_after=2, max_attempts=9)
        init = claim_init(store, f"{batch_id}.0.0")
        assert advance(store, init)
        run = claimed(store, f"{batch_id}.0.0", Stage.RUN)
        assert advance(store, run, policy_outcome="submitted", submission={})
        assert finish(store, claimed(store, f"{batch_id}.0.0", Stage.EVAL))
        for _ in range(5):
            end(store, claim_init(store, f"{batch_id}.0.1"), Outcome.SANDBOX_ERROR)
        assert rollout(store, f"{batch_id}.0.2").state is not State.FAILED

    def test_quarantine_needs_failures_on_two_nodes_if_there_are_two(self, store: Store) -> None:
        announce_nodes(store, "n1", "n2")
        batch_id = new_batch(store, n_samples=2, quarantine_after=2, max_attempts=9)
        for _ in range(4):
            end(store, claim_init(store, f"{batch_id}.0.0"), Outcome.SANDBOX_ERROR)
        assert rollout(store, f"{batch_id}.0.1").state is not State.FAILED
        store.write(partial(nodes.drain, node="n2"))
        end(store, claim_init(store, f"{batch_id}.0.0"), Outcome.SANDBOX_ERROR)
        assert rollout(store, f"{batch_id}.0.1").state is State.FAILED

    def test_successful_rollout_needs_no_extra_statement(self, store: Store) -> None:
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

    def test_node_takes_none_then_few_then_all_rollouts(self, store: Store) -> None:
        announce_nodes(store, "n1", "n2")
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

    def test_time_out_of_service_grows(self, store: Store) -> None:
        announce_nodes(store, "n1", "n2")
        result = []
        for _ in range(7):
            result.append(self.trip(store, "n1"))
            self.over(store, "n1")
        assert result == [30, 60, 120, 240, 480, 600, 600]

    def test_open_breaker_is_not_opened_again(self, store: Store) -> None:
        announce_nodes(store, "n1", "n2")
        assert self.trip(store, "n1")
        assert self.trip(store, "n1", "run: another") == 0.0
        assert known(store)["n1"].n_trips == 1

    def test_repeated_request_gets_the_same_answer(self, store: Store) -> None:
        announce_nodes(store, "n1", "n2")
        why = "init: a\0b" + "x" * 100_000
        self.trip(store, "n1", why)
        again = self.trip(store, "n1", why)
        assert again is not None
        assert 20.0 < again <= 30.0
        assert known(store)["n1"].n_trips == 1
        why = known(store)["n1"].out_of_service_why
        self.over(store, "n1")
        assert [store.write(partial(nodes.close_breaker, node="n1", why=why)) for _ in range(2)] == [True, True]

    def test_last_healthy_node_is_never_taken_out(self, store: Store) -> None:
        announce_nodes(store, "n1", "n2", "n3")
        store.write(partial(nodes.drain, node="n3"))
        assert self.trip(store, "n1")
        assert self.trip(store, "n2") is None
        assert known(store)["n2"].takes == 8

    def test_restart_does_not_close_the_breaker(self, store: Store) -> None:
        announce_nodes(store, "n1", "n2")
        self.trip(store, "n1")
        announce_nodes(store, "n1")
        node = known(store)["n1"]
        assert (node.takes, node.n_trips, node.out_of_service_why) == (0, 1, "init: why")
        assert store.read(partial(nodes.breaker_reason, node="n1")) == "init: why"
        assert store.read(partial(nodes.breaker_reason, node="n2")) == ""
