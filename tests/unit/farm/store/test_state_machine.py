"""No sequence of events puts a batch into an invalid state: any order of transitions, at any moment.

A model in plain Python predicts each transition; the database must agree after each step, and the audit must find
nothing. Claims are kept forever and used again late, as by workers that were suspended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from farm.ids import RolloutRef
from farm.records.request import BatchRequest, Instance
from farm.records.rollout import Failure, Outcome, Stage, State
from farm.records.trajectory import ModelCall, segments, token_ids
from farm.retry_policy import DRAINED, RESTARTED, retry_decision
from farm.store import (
    attempts,
    batches,
    cancel_and_rescore,
    consumers,
    leases,
    migrations,
    placement,
    rollouts,
    trajectories,
)
from farm.store.attempts import RetrySettings
from farm.store.database import Store
from farm.store.placement import StageMessage
from farm.store.reports import audit
from farm.store.rollouts import NEXT_STAGE, Claim, RunSummary
from tests.secret_keys import key_of
from tests.services.model_calls import model_call
from tests.services.soak import repeats

N_GROUPS = 2
N_SAMPLES = 2
NODES = ("one", "two")
ENDED = {State.COMPLETED, State.FAILED, State.CANCELLED}
CAUSES = [Outcome.SANDBOX_ERROR, Outcome.ENGINE_ERROR, Outcome.LOST, Outcome.STALE, DRAINED, RESTARTED]


@dataclass
class ModelRollout:
    """The model's state of a rollout."""

    stage: Stage = Stage.INIT
    state: State = State.QUEUED
    attempt: int = 1
    node: str | None = None
    held: Claim | None = None
    number: int = 0
    begun: bool = False
    scores: tuple[float, ...] = ()

    def back(self, stage: Stage) -> None:
        self.stage, self.state, self.node, self.held, self.begun = stage, State.QUEUED, None, None, False
        self.attempt += 1

    def end(self, state: State, number: int) -> None:
        self.held, self.number = None, number
        # a score can only be followed by another score
        self.state = State.COMPLETED if self.scores else state

    @property
    def reward(self) -> float | None:
        return self.scores[-1] if self.scores and self.state in ENDED else None


def restarts_at(stage: Stage) -> Stage:
    return Stage.EVAL if stage is Stage.EVAL else Stage.INIT


class _Farm(RuleBasedStateMachine):
    """One batch of two groups on a store that all runs share."""

    store: Store

    @initialize(quarantine_after=st.sampled_from([0, 3]), max_losses=st.integers(0, 2))
    def submit(self, quarantine_after: int, max_losses: int) -> None:
        instances = tuple(Instance(data_source="noop", fields={}) for _ in range(N_GROUPS))
        request = BatchRequest(
            instances=instances,
            n_samples=N_SAMPLES,
            max_attempts=2,
            max_losses=max_losses,
            quarantine_after=quarantine_after,
        )
        self.batch_id, _ = self.store.write(
            lambda connection: batches.create(connection, request, "f", key_of(self.store))
        )
        self.known = {f"{self.batch_id}.{g}.{s}": ModelRollout() for g in range(N_GROUPS) for s in range(N_SAMPLES)}
        self.claims: list[Claim] = []
        self.endings: dict[int, str] = {}
        self.last = 0
        self.acknowledged = 0

    def write(self, work: Any, *arguments: Any, **names: Any) -> Any:
        return self.store.write(lambda connection: work(connection, *arguments, **names))

    def one(self, index: int) -> tuple[str, ModelRollout]:
        return list(self.known.items())[index]

    def number(self) -> int:
        self.last += 1
        return self.last

    def is_current(self, held: Claim) -> bool:
        return self.known[held.rollout_id].held is held

    @rule(node=st.sampled_from(NODES), in_run=st.booleans())
    def place(self, node: str, in_run: bool = False) -> None:
        first = {one.stage: one.stage for one in self.known.values()} | ({Stage.INIT: Stage.RUN} if in_run else {})
        stage_messages = [
            StageMessage(rollout_id, one.attempt, first[one.stage], node) for rollout_id, one in self.known.items()
        ]
        self.write(placement.place, stage_messages, 3.0)
        for one in self.known.values():
            if one.state is State.QUEUED and one.node is None:
                one.node, one.stage = node, first[one.stage]

    @rule(index=st.integers(0, 3), node=st.sampled_from(NODES), ago=st.sampled_from([0, 0, 0, 1]))
    def claim(self, index: int, node: str, ago: int) -> None:
        rollout_id, one = self.one(index)
        # all examples share a database
        owner = f"{self.batch_id}/w{len(self.claims)}"
        held = self.write(rollouts.claim, rollout_id, one.attempt - ago, one.stage, node, owner, 60.0)
        assert (held is not None) == (one.state is State.QUEUED and one.node == node and not ago)
        if held is not None:
            self.claims.append(held)
            one.state, one.held, one.begun = State.ACTIVE, held, True

    @rule(index=st.integers(0, 3), node=st.sampled_from(NODES), n_steps=st.integers(1, 7))
    def go_on(self, index: int, node: str, n_steps: int) -> None:
        """Do as a farm without faults does: without this rule, chance would rarely complete a rollout."""
        _, one = self.one(index)
        for _ in range(n_steps):
            if one.held is not None:
                self.end_stage(self.claims.index(one.held), one.held, 1)
            elif one.state is State.QUEUED and one.node is None:
                self.place(node)
            elif one.state is State.QUEUED:
                self.claim(index, one.node or "", 0)

    any_claim = st.integers(0, 1000)

    def chosen(self, number: int) -> tuple[int, Claim]:
        """The newest claims are the most likely."""
        index = max(0, len(self.claims) - 1 - number % 7) if number % 5 else number % len(self.claims)
        return index, self.claims[index]

    @precondition(lambda self: self.claims)
    @rule(number=any_claim)
    def renew(self, number: int) -> None:
        _, held = self.chosen(number)
        kept = self.write(leases.renew, held.owner, [held.rollout_id], 60.0)
        assert kept == ({held.rollout_id} if self.is_current(held) else set())

    @precondition(lambda self: self.claims)
    @rule(number=any_claim, n_rows=st.integers(0, 2))
    def end_a_stage(self, number: int, n_rows: int) -> None:
        self.end_stage(*self.chosen(number), n_rows)

    def end_stage(self, index: int, held: Claim, n_rows: int) -> None:
        if held.stage is Stage.EVAL:
            self.finish(index, held)
            return
        applies = self.is_current(held)
        written = self.write(advance_stage, held, n_rows if applies else 0)
        assert written == (applies or self.endings.get(index) == "advanced")
        if applies:
            one = self.known[held.rollout_id]
            one.stage, one.state, one.held = NEXT_STAGE[held.stage], State.QUEUED, None
            self.endings[index] = "advanced"

    def finish(self, index: int, held: Claim) -> None:
        applies = self.is_current(held)
        value = len(self.claims) / 8
        written = self.write(rollouts.finish, held, value, {}, "test")
        assert written == (applies or self.endings.get(index) == "completed")
        if applies:
            self.known[held.rollout_id].scores += (value,)
            self.known[held.rollout_id].end(State.COMPLETED, self.number())
            self.endings[index] = "completed"

    @precondition(lambda self: self.claims)
    @rule(number=any_claim, cause=st.sampled_from(CAUSES), retryable=st.booleans())
    def fail(self, number: int, cause: str, retryable: bool) -> None:
        _, held = self.chosen(number)
        self.close(held, cause, retryable)

    def close(self, held: Claim, cause: str, retryable: bool = True) -> None:
        ruling = retry_decision(cause, retryable)
        kind = cause if cause in set(Outcome) else ruling.outcome
        ending = self.write(attempts.end_attempt, held, Failure(kind, "broken"), ruling, RetrySettings(0.0, 60.0))
        assert (ending is not None) == self.is_current(held)
        if ending is None:
            return
        one = self.known[held.rollout_id]
        if ending.again_in_s is not None:
            one.back(restarts_at(one.stage))
            return
        one.end(State.FAILED, self.number())
        siblings = [each for name, each in self.known.items() if RolloutRef.of(name).group_index == held.group_index]
        waiting = [each for each in siblings if each.state is State.QUEUED and not each.begun]
        given_up = waiting if ending.n_quarantined else []
        assert len(given_up) == ending.n_quarantined
        for each in given_up:
            each.end(State.FAILED, self.number())
            each.attempt += 1

    @precondition(lambda self: self.claims)
    @rule(number=any_claim)
    def worker_dies(self, number: int) -> None:
        _, dead = self.chosen(number)
        assert self.write(leases.expire_owner, dead.owner) == self.is_current(dead)
        mine = [held for held in self.write(leases.expired, 100, True) if held.batch_id == self.batch_id]
        for held in mine:
            (ours,) = [claim for claim in self.claims if claim.owner == held.owner]
            self.close(ours, Outcome.LOST)
        assert not self.is_current(dead)

    @rule(node=st.sampled_from(NODES))
    def node_dies(self, node: str) -> None:
        self.write(placement.requeue_of_dead_nodes, [node])
        self.leave(node, lambda one: one.state is State.QUEUED)

    @rule(node=st.sampled_from(NODES))
    def node_drains(self, node: str) -> None:
        self.write(placement.requeue_unstarted, node)
        for one in self.known.values():
            if one.node == node and one.state is State.QUEUED and one.stage is not Stage.EVAL and not one.begun:
                one.node, one.stage = None, Stage.INIT

    @rule(node=st.sampled_from(NODES))
    def node_ends(self, node: str) -> None:
        self.write(placement.requeue_all, node)
        self.leave(node, lambda one: True)

    def leave(self, node: str, which: Any) -> None:
        for one in self.known.values():
            if one.node == node and one.state not in ENDED and which(one):
                one.back(restarts_at(one.stage))

    targets = st.tuples(st.integers(0, 1) | st.none(), st.integers(0, 1) | st.none())

    def target(self, parts: tuple[int | None, int | None]) -> tuple[RolloutRef, list[str]]:
        group, sample = parts
        target = RolloutRef(self.batch_id, group, sample if group is not None else None)
        return target, [each for each in self.known if f"{each}.".startswith(f"{target}.")]

    @rule(parts=targets, few=st.booleans())
    def cancel(self, parts: tuple[int | None, int | None], few: bool) -> None:
        target, named = self.target(parts)
        if few:
            named = named[:1]
        live = [each for each in named if self.known[each].state not in ENDED]
        assert self.write(cancel_and_rescore.cancel, target, named if few else None) == live
        for each in live:
            self.known[each].end(State.CANCELLED, self.number())
            self.known[each].attempt += 1

    @rule(parts=targets)
    def rescore(self, parts: tuple[int | None, int | None]) -> None:
        target, named = self.target(parts)
        ended = {State.COMPLETED, State.FAILED}
        again = [each for each in named if self.known[each].state in ended and self.known[each].stage is Stage.EVAL]
        assert self.write(cancel_and_rescore.rescore, target) == again
        for each in again:
            self.known[each].back(Stage.EVAL)

    @rule(back=st.integers(0, 3))
    def acknowledge(self, back: int) -> None:
        cursor = max(0, self.last - back)
        self.acknowledged = max(self.acknowledged, cursor)
        assert self.write(consumers.acknowledge, self.batch_id, "trainer", cursor) == self.acknowledged

    @invariant()
    def audit_reports_no_violation(self) -> None:
        assert self.store.read(lambda connection: audit.violations(connection, self.batch_id)) == []

    @invariant()
    def database_agrees_with_the_model(self) -> None:
        result = self.store.read(lambda connection: batches.rollouts_of(connection, self.batch_id))
        assert {
            each.rollout_id: (
                *(each.stage, each.state, each.attempt, each.reward),
                each.cursor if each.state in ENDED else 0,
            )
            for each in result
        } == {
            rollout_id: (one.stage, one.state, one.attempt, one.reward, one.number if one.state in ENDED else 0)
            for rollout_id, one in self.known.items()
        }


def advance_stage(connection: Any, held: Claim, n_rows: int) -> bool:
    """End the first two stages like a worker."""
    if held.stage is Stage.INIT:
        return rollouts.advance(connection, held, 3.0)
    result = RunSummary("submitted", {}, n_turns=1, n_response_tokens=1, n_segments=n_rows)
    if not rollouts.advance(connection, held, 3.0, result):
        return False
    if n_rows:
        rows = segments(calls()[:n_rows])
        trajectories.store_segments(connection, held.rollout_id, held.batch_id, held.attempt, rows)
    return True


@lru_cache
def calls() -> list[ModelCall]:
    """Two rules that continue from nothing."""
    made = [model_call(index) for index in range(2)]
    for call in made:
        call.prompt_ids, call.response_ids = token_ids([call.index]), token_ids([7])
        call.response_logprobs = call.response_ids.astype("float32")
    return made


@contextmanager
def shared_store() -> Iterator[Store]:
    with TemporaryDirectory() as folder:
        store = Store(f"sqlite:///{Path(folder) / 'farm.db'}")
        migrations.migrate(store)
        try:
            yield store
        finally:
            store.close()


@pytest.mark.soak
def test_no_sequence_of_events_puts_a_rollout_into_an_invalid_state() -> None:
    n_examples, checks = repeats(15, 300), [HealthCheck.too_slow, HealthCheck.filter_too_much]
    with shared_store() as _Farm.store:
        run_state_machine_as_test(
            _Farm,
            settings=settings(
                max_examples=n_examples, stateful_step_count=20, deadline=None, suppress_health_check=checks
            ),
        )
