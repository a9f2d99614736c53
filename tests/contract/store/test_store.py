"""The promises of the store, on SQLite and on Postgres."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, delete, event, insert, select, update
from sqlalchemy.exc import IntegrityError

from farm.errors import Conflict, InvalidRequest, NotFound, StoreUnavailable
from farm.ids import RolloutRef
from farm.records.node import BROKEN, DRAINING, UP, Node
from farm.records.request import BatchRequest, Instance
from farm.records.rollout import BatchStatus, Failure, Outcome, Stage, State
from farm.records.trajectory import ModelCall, VersionSpan, segments, token_ids, tools_by_call
from farm.store import (
    batches,
    cancel_and_rescore,
    leader,
    leases,
    llm_engines,
    migrations,
    nodes,
    placement,
    rollouts,
    trajectories,
)
from farm.store.blobs import artefacts
from farm.store.database import Store
from farm.store.rollouts import Claim, RunSummary
from farm.store.sql.clock import db_now
from farm.store.sql.schema import Base, Batch
from tests.secret_keys import key_of

NODE = "n1"
LOST = Failure(Outcome.LOST, "gone")


def new_batch(store: Store, n: int = 1, n_samples: int = 1, **values: Any) -> str:
    instances = tuple(Instance(data_source="noop", fields={"i": i}) for i in range(n))
    request = BatchRequest(instances=instances, n_samples=n_samples, **values)
    return store.write(lambda connection: batches.create(connection, request, "f", key_of(store)))[0]


def place(store: Store, batch_id: str, node: str = NODE, in_run: bool = False) -> None:
    """Place all of a batch; `in_run` as rollouts that need no sandbox."""
    first = {stage: stage for stage in Stage} | ({Stage.INIT: Stage.RUN} if in_run else {})
    result = store.read(lambda connection: placement.next_of(connection, batch_id, 10_000))
    stage_messages = [placement.StageMessage(each.rollout_id, each.attempt, first[each.stage], node) for each in result]
    # a dispatcher may have done it before
    if stage_messages:
        store.write(lambda connection: placement.place(connection, stage_messages, 3.0))


def announce(store: Store, n_slots: int = 8, **info: Any) -> None:
    """Announce the node, with so many slots for each stage."""
    node = Node(NODE, 3 * n_slots, n_slots, n_slots, n_slots, ["noop"], info)
    store.write(lambda connection: nodes.announce(connection, node))


def claim(
    store: Store, rollout_id: str, stage: Stage, attempt: int = 1, owner: str = "w", lease_s: float = 60.0
) -> Claim | None:
    return store.write(lambda connection: rollouts.claim(connection, rollout_id, attempt, stage, NODE, owner, lease_s))


def claimed(store: Store, rollout_id: str, stage: Stage, attempt: int = 1, lease_s: float = 60.0) -> Claim:
    result = claim(store, rollout_id, stage, attempt, lease_s=lease_s)
    assert result is not None
    return result


def advance(store: Store, held: Claim, **values: Any) -> bool:
    summary = RunSummary(**{"n_turns": 1, "n_response_tokens": 2, **values}) if values else None
    return store.write(lambda connection: rollouts.advance(connection, held, 3.0, summary))


def finish(store: Store, held: Claim, reward: float = 1.0) -> bool:
    return store.write(lambda connection: rollouts.finish(connection, held, reward, {"why": "x"}, "test"))


def fail(store: Store, held: Claim, retry_in_s: float | None) -> bool:
    if retry_in_s is None:
        return store.write(lambda connection: rollouts.fail(connection, held, LOST, {}))
    later = {"ready_at": db_now() + retry_in_s}
    return store.write(lambda connection: rollouts.requeue(connection, held, LOST, later))


def run_to_end(store: Store, rollout_id: str, attempt: int = 1, reward: float = 1.0, in_run: bool = False) -> None:
    assert in_run or advance(store, claimed(store, rollout_id, Stage.INIT, attempt))
    ended = {"policy_outcome": "submitted", "submission": {"answer": "42"}}
    assert advance(store, claimed(store, rollout_id, Stage.RUN, attempt), **ended)
    assert finish(store, claimed(store, rollout_id, Stage.EVAL, attempt), reward)


def status(store: Store, batch_id: str) -> BatchStatus:
    return store.read(lambda connection: batches.status(connection, batch_id))


class TestSchema:
    def test_head_revision_equals_the_tables(self, store: Store) -> None:
        from alembic.autogenerate import compare_metadata
        from alembic.runtime.migration import MigrationContext

        def differences(connection: Connection) -> list[Any]:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            return list(compare_metadata(context, Base.metadata))

        assert store.read(differences) == []

    def test_every_revision_upgrades_and_downgrades(self, store_url: str) -> None:
        store = Store(store_url)
        try:
            for _ in range(2):
                migrations.migrate(store)
                assert migrations.revision(store) == migrations.head()
                migrations.migrate(store, "base")
                assert migrations.revision(store) is None
        finally:
            store.close()

    def test_other_revision_is_refused_with_the_remedy(self, store_url: str) -> None:
        store = Store(store_url)
        try:
            with pytest.raises(StoreUnavailable, match="farm migrate"):
                migrations.check(store)
        finally:
            store.close()


class TestSubmit:
    def test_same_key_gives_the_same_batch(self, store: Store) -> None:
        assert new_batch(store, idempotency_key="k") == new_batch(store, idempotency_key="k")

    def test_same_key_for_another_request_is_a_conflict(self, store: Store) -> None:
        new_batch(store, idempotency_key="k")
        request = BatchRequest(instances=(Instance(data_source="x", fields={}),), idempotency_key="k")
        with pytest.raises(Conflict, match="'k'"):
            store.write(lambda connection: batches.create(connection, request, "another", key_of(store)))

    def test_concurrent_submits_with_one_key_make_one_batch(self, store: Store) -> None:
        others = [Store(store.url) for _ in range(4)]
        start = threading.Barrier(4)

        def submit(other: Store) -> str:
            start.wait()
            try:
                return new_batch(other, n=50, idempotency_key="k")
            except IntegrityError:
                return new_batch(other, n=50, idempotency_key="k")

        try:
            with ThreadPoolExecutor(4) as threads:
                assert len(set(threads.map(submit, others))) == 1
        finally:
            for other in others:
                other.close()

    def test_unknown_batch_is_not_found(self, store: Store) -> None:
        with pytest.raises(NotFound, match="nope"):
            status(store, "nope")

    def test_findings_of_tasks_are_stored_with_the_batch(self, store: Store) -> None:
        findings = ("1 of 1 tasks is vacuous (ä)",)
        assert status(store, new_batch(store, findings=findings)).findings == findings
        batch_id = new_batch(store)
        assert status(store, batch_id).findings == ()
        # as an earlier version stored it
        stored = store.read(lambda connection: batches.request_of(connection, batch_id))
        older = {name: value for name, value in stored.items() if name != "findings"}
        store.write(lambda connection: connection.execute(update(Batch).values(request=older)))
        assert status(store, batch_id).findings == ()

    def test_instances_are_read_back_unchanged(self, store: Store) -> None:
        batch_id = new_batch(store, 3)
        assert store.read(lambda connection: batches.instance_fields(connection, batch_id, 2)) == ("noop", {"i": 2}, "")


class TestTransitions:
    def test_rollout_passes_through_its_stages(self, store: Store) -> None:
        batch_id = new_batch(store)
        place(store, batch_id)
        run_to_end(store, f"{batch_id}.0.0", reward=0.5)
        (rollout,) = store.read(lambda connection: batches.rollouts_of(connection, batch_id))
        assert (rollout.state, rollout.outcome, rollout.reward) == (State.COMPLETED, Outcome.SUBMITTED, 0.5)
        assert rollout.finished_at is not None
        assert rollout.finished_at >= rollout.submitted_at
        assert rollout.trainable
        timings = store.read(lambda connection: batches.timings(connection, rollout.rollout_id))
        assert [(each.stage, each.result) for each in timings] == [
            (Stage.INIT, "advanced"),
            (Stage.RUN, "advanced"),
            (Stage.EVAL, "completed"),
        ]
        assert all(each.queued_s is not None and each.queued_s >= 0 for each in timings)
        (score,) = store.read(lambda connection: batches.rewards_of(connection, rollout.rollout_id))
        assert (score.value, score.details, score.evaluator) == (0.5, {"why": "x"}, "test")

    def test_counts_of_a_run_are_on_its_rollout_and_its_batch(self, store: Store) -> None:
        batch_id = new_batch(store, n=2)
        place(store, batch_id)
        rollout_id = f"{batch_id}.0.0"
        counts = {"n_invalid_actions": 3, "n_mismatches": 2, "n_segments": 4, "version_min": 7, "version_max": 9}
        advance(store, claimed(store, rollout_id, Stage.INIT))
        summary = {"policy_outcome": "submitted", "submission": {}} | counts
        assert advance(store, claimed(store, rollout_id, Stage.RUN), **summary)
        rollout = store.read(lambda connection: batches.rollout(connection, rollout_id))
        assert {name: getattr(rollout, name) for name in counts} == counts
        batch_status = status(store, batch_id)
        assert (batch_status.n_mismatches, batch_status.n_invalid_actions) == (2, 3)

    def test_one_of_many_claims_wins(self, store: Store) -> None:
        batch_id = new_batch(store, n=20)
        place(store, batch_id)
        others = [Store(store.url) for _ in range(4)]
        names = [f"{batch_id}.{i}.0" for i in range(20)]
        try:
            with ThreadPoolExecutor(8) as threads:
                tries = [(other, name) for name in names for other in others]
                won = list(threads.map(lambda job: claim(job[0], job[1], Stage.INIT), tries))
        finally:
            for other in others:
                other.close()
        assert sorted(each.rollout_id for each in won if each is not None) == sorted(names)

    def test_claim_needs_the_right_node_attempt_and_stage(self, store: Store) -> None:
        batch_id = new_batch(store)
        rollout_id = f"{batch_id}.0.0"
        assert claim(store, rollout_id, Stage.INIT) is None, "it is on no node yet"
        place(store, batch_id, "elsewhere")
        assert claim(store, rollout_id, Stage.INIT) is None
        store.write(lambda connection: placement.requeue_of_dead_nodes(connection, ["elsewhere"]))
        place(store, batch_id)
        assert claim(store, rollout_id, Stage.INIT, attempt=1) is None, "taking it off a node ended that attempt"
        assert claim(store, rollout_id, Stage.RUN, attempt=2) is None
        assert claim(store, rollout_id, Stage.INIT, attempt=2) is not None

    def test_expired_worker_writes_nothing(self, store: Store) -> None:
        batch_id = new_batch(store)
        place(store, batch_id)
        rollout_id = f"{batch_id}.0.0"
        zombie = claimed(store, rollout_id, Stage.INIT, lease_s=-1.0)
        (result,) = store.read(lambda connection: leases.expired(connection, 10))
        assert (result.rollout_id, result.owner) == (rollout_id, "w")
        assert fail(store, result, 0.0)
        place(store, batch_id)
        second = claimed(store, rollout_id, Stage.INIT, attempt=2)
        assert not advance(store, zombie)
        assert not finish(store, zombie)
        assert not fail(store, zombie, None)
        assert store.write(lambda connection: leases.renew(connection, "other", [rollout_id], 60.0)) == set()
        assert advance(store, second)
        assert status(store, batch_id).n_finished == 0

    def test_renewal_returns_the_claims_still_held(self, store: Store) -> None:
        batch_id = new_batch(store, n=2)
        place(store, batch_id)
        held = [claimed(store, f"{batch_id}.{i}.0", Stage.INIT) for i in range(2)]
        store.write(
            lambda connection: cancel_and_rescore.cancel(connection, RolloutRef(batch_id), [held[0].rollout_id])
        )
        ids = [each.rollout_id for each in held]
        assert store.write(lambda connection: leases.renew(connection, "w", ids, 60.0)) == {held[1].rollout_id}

    def test_failed_scoring_is_repeated_without_another_run(self, store: Store) -> None:
        batch_id = new_batch(store)
        place(store, batch_id)
        rollout_id = f"{batch_id}.0.0"
        advance(store, claimed(store, rollout_id, Stage.INIT))
        advance(store, claimed(store, rollout_id, Stage.RUN), policy_outcome="submitted", submission={"answer": "a"})
        assert fail(store, claimed(store, rollout_id, Stage.EVAL), 0.0)
        place(store, batch_id)
        again = claimed(store, rollout_id, Stage.EVAL, attempt=2)
        assert again.submission == {"answer": "a"}
        assert finish(store, again)

    def test_failed_run_starts_over(self, store: Store) -> None:
        batch_id = new_batch(store)
        place(store, batch_id)
        rollout_id = f"{batch_id}.0.0"
        advance(store, claimed(store, rollout_id, Stage.INIT))
        assert fail(store, claimed(store, rollout_id, Stage.RUN), 0.0)
        place(store, batch_id)
        run_to_end(store, rollout_id, attempt=2)
        assert store.read(lambda connection: batches.rollout(connection, rollout_id)).failure is None
        timings = store.read(lambda connection: batches.timings(connection, rollout_id))
        assert [each.failure for each in timings if each.attempt == 1 and each.stage is Stage.RUN] == [LOST]

    def test_failed_rollout_has_no_reward(self, store: Store) -> None:
        batch_id = new_batch(store)
        place(store, batch_id)
        assert fail(store, claimed(store, f"{batch_id}.0.0", Stage.INIT), None)
        batch_status = status(store, batch_id)
        assert (batch_status.n_failed, batch_status.failures, batch_status.mean_reward, batch_status.done) == (
            1,
            {"lost": 1},
            None,
            True,
        )
        (rollout,) = store.read(lambda connection: batches.rollouts_of(connection, batch_id))
        assert (rollout.reward, rollout.trainable, rollout.outcome) == (None, False, Outcome.LOST)

    def test_retry_waits_for_its_delay(self, store: Store) -> None:
        batch_id = new_batch(store)
        place(store, batch_id)
        assert fail(store, claimed(store, f"{batch_id}.0.0", Stage.INIT), 50.0)
        assert store.read(lambda connection: placement.waiting(connection, 1)) == []

    def test_rescored_rollout_keeps_its_outcome_and_both_scores(self, store: Store) -> None:
        batch_id = new_batch(store, n=2)
        place(store, batch_id)
        run_to_end(store, f"{batch_id}.0.0", reward=0.0)
        assert store.write(lambda connection: cancel_and_rescore.rescore(connection, RolloutRef(batch_id), None)) == [
            f"{batch_id}.0.0"
        ]
        assert status(store, batch_id).n_finished == 0
        place(store, batch_id)
        assert finish(store, claimed(store, f"{batch_id}.0.0", Stage.EVAL, attempt=2), 1.0)
        rollout = store.read(lambda connection: batches.rollout(connection, f"{batch_id}.0.0"))
        assert (rollout.reward, rollout.outcome) == (1.0, Outcome.SUBMITTED)
        scores = store.read(lambda connection: batches.rewards_of(connection, f"{batch_id}.0.0"))
        assert [score.value for score in scores] == [0.0, 1.0]


class TestCancel:
    def test_cancel_ends_all_open_rollouts_once(self, store: Store) -> None:
        batch_id = new_batch(store, n=3)
        place(store, batch_id)
        run_to_end(store, f"{batch_id}.0.0")
        held = claimed(store, f"{batch_id}.1.0", Stage.INIT)
        ids = store.write(lambda connection: cancel_and_rescore.cancel(connection, RolloutRef(batch_id), None))
        assert sorted(ids) == [f"{batch_id}.1.0", f"{batch_id}.2.0"]
        assert not advance(store, held)
        assert store.write(lambda connection: cancel_and_rescore.cancel(connection, RolloutRef(batch_id), None)) == []
        batch_status = status(store, batch_id)
        assert (batch_status.n_completed, batch_status.n_cancelled, batch_status.done) == (1, 2, True)


def keep(store: Store, held: Claim, name: str, data: bytes) -> bool:
    packed = artefacts.packed(data)
    return store.write(
        lambda connection: artefacts.keep(connection, held, name, "text/plain", len(data), packed),
    )


class TestArtefacts:
    def held(self, store: Store, batch_id: str, attempt: int = 1) -> Claim:
        place(store, batch_id)
        advance(store, claimed(store, f"{batch_id}.0.0", Stage.INIT, attempt))
        return claimed(store, f"{batch_id}.0.0", Stage.RUN, attempt)

    def names(self, store: Store, rollout_id: str) -> list[str]:
        return [each.name for each in store.read(lambda connection: artefacts.listing(connection, rollout_id))]

    def contents(self, store: Store, rollout_id: str, name: str) -> bytes:
        return store.read(lambda connection: artefacts.contents(connection, rollout_id, name))

    def test_artefacts_are_read_back_unchanged_and_compressed(self, store: Store) -> None:
        held = self.held(store, new_batch(store))
        result = {"a.txt": b"line\n" * 100_000, "b.png": bytes(range(256)), "empty": b""}
        for name, data in result.items():
            assert keep(store, held, name, data)
        assert {name: self.contents(store, held.rollout_id, name) for name in result} == result
        kept_artefacts = store.read(lambda connection: artefacts.listing(connection, held.rollout_id))
        assert {each.name: each.n_bytes for each in kept_artefacts} == {
            name: len(data) for name, data in result.items()
        }
        assert next(each.n_stored for each in kept_artefacts if each.name == "a.txt") < 10_000

    def test_repeated_write_is_stored_once(self, store: Store) -> None:
        held = self.held(store, new_batch(store))
        assert keep(store, held, "a", b"first")
        assert keep(store, held, "a", b"first")
        assert self.names(store, held.rollout_id) == ["a"]

    def test_only_the_holder_of_the_claim_writes(self, store: Store) -> None:
        batch_id = new_batch(store)
        zombie = self.held(store, batch_id)
        assert keep(store, zombie, "a", b"of the first attempt")
        assert fail(store, zombie, 0.0)
        assert not keep(store, zombie, "b", b"late")
        second = self.held(store, batch_id, attempt=2)
        assert not keep(store, zombie, "b", b"late")
        assert self.names(store, zombie.rollout_id) == ["a"], "of the last attempt that has any"
        assert keep(store, second, "a", b"of the second")
        assert self.contents(store, zombie.rollout_id, "a") == b"of the second"

    def test_missing_artefact_is_not_found(self, store: Store) -> None:
        held = self.held(store, new_batch(store))
        assert self.names(store, held.rollout_id) == []
        with pytest.raises(NotFound, match="nope"):
            self.contents(store, held.rollout_id, "nope")

    def test_artefacts_are_deleted_with_the_batch(self, store: Store) -> None:
        held = self.held(store, new_batch(store))
        keep(store, held, "a", b"x")
        table = Batch.__table__
        store.write(lambda connection: connection.execute(delete(table)))
        assert self.names(store, held.rollout_id) == []


class TestCursor:
    def test_rollouts_are_numbered_in_the_order_of_their_ends(self, store: Store) -> None:
        batch_id = new_batch(store, n=4)
        place(store, batch_id)
        for index in (2, 0, 3):
            run_to_end(store, f"{batch_id}.{index}.0")
        store.write(lambda connection: cancel_and_rescore.cancel(connection, RolloutRef(batch_id), None))
        ended = store.read(lambda connection: batches.ended_after(connection, batch_id, 0, 100))
        assert [(each.group_index, each.cursor) for each in ended] == [(2, 1), (0, 2), (3, 3), (1, 4)]
        rest = store.read(lambda connection: batches.ended_after(connection, batch_id, 2, 100))
        assert [each.group_index for each in rest] == [3, 1]

    def test_finish_that_does_not_apply_leaves_the_count(self, store: Store) -> None:
        batch_id = new_batch(store, n=2)
        place(store, batch_id)
        run_to_end(store, f"{batch_id}.0.0")
        stale = Claim(f"{batch_id}.0.0", 2, Stage.EVAL, "w", batch_id, 0, 0, NODE, None, None)
        assert not finish(store, stale)
        its_own = replace(stale, attempt=1)
        assert finish(store, its_own), "one whose answer was lost is told that it applied"
        batch_status = status(store, batch_id)
        assert (batch_status.n_finished, batch_status.n_completed) == (1, 1)
        run_to_end(store, f"{batch_id}.1.0")
        ended = store.read(lambda connection: batches.ended_after(connection, batch_id, 0, 100))
        assert [each.cursor for each in ended] == [1, 2]

    def test_only_complete_groups_are_returned(self, store: Store) -> None:
        batch_id = new_batch(store, n=2, n_samples=2)
        place(store, batch_id)
        for name in ("0.0", "1.0", "1.1"):
            run_to_end(store, f"{batch_id}.{name}")
        (group,) = store.read(lambda connection: batches.groups_after(connection, batch_id, 0, 100))
        assert [each.rollout_id for each in group] == [f"{batch_id}.1.0", f"{batch_id}.1.1"]
        assert store.read(lambda connection: batches.groups_after(connection, batch_id, 3, 100)) == []
        run_to_end(store, f"{batch_id}.0.1")
        (group,) = store.read(lambda connection: batches.groups_after(connection, batch_id, 3, 100))
        assert group[0].group_index == 0

    def test_rescore_during_a_page_read_skips_no_group(self, store: Store) -> None:
        batch_id = new_batch(store, n=3)
        place(store, batch_id)
        for index in range(2):
            run_to_end(store, f"{batch_id}.{index}.0")
        result: list[str] = []

        def meanwhile(*call: Any) -> None:
            result.append(call[2])
            if len(result) == 1:
                run_to_end(store, f"{batch_id}.2.0")
                store.write(lambda connection: cancel_and_rescore.rescore(connection, RolloutRef(batch_id, 0)))
                place(store, batch_id)
                assert finish(store, claimed(store, f"{batch_id}.0.0", Stage.EVAL, 2))

        event.listen(store.engine, "after_cursor_execute", meanwhile)
        page = store.read(lambda connection: batches.groups_after(connection, batch_id, 0, 2))
        event.remove(store.engine, "after_cursor_execute", meanwhile)
        assert len(result) > 1
        cursor = max(group[0].cursor for group in page)
        rest = store.read(lambda connection: batches.groups_after(connection, batch_id, cursor, 100))
        assert {group[0].group_index for group in page + rest} == {0, 1, 2}


class TestTrajectories:
    def test_model_calls_are_stored_as_differences_and_read_back_whole(self, store: Store) -> None:
        batch_id = new_batch(store)
        log = trajectories.CallLog(f"{batch_id}.0.0", 1)
        first, second = _call(0, [1, 2], [3, 4]), _call(1, [1, 2, 3, 4, 5], [6])
        for call in (first, second):
            store.write(lambda connection, call=call: trajectories.record_call(connection, log.row(call)))  # type: ignore[misc]
        second.observations = [{"role": "tool", "content": "ok"}]
        row = log.row(second)
        assert (row["prefix_call"], row["prompt_ids"].tolist()) == (0, [5])
        store.write(lambda connection: trajectories.record_call(connection, row))
        result = store.read(lambda connection: trajectories.calls(connection, f"{batch_id}.0.0"))
        assert [call.prompt_ids.tolist() for call in result if call.prompt_ids is not None] == [[1, 2], [1, 2, 3, 4, 5]]
        assert result[1].observations == [{"role": "tool", "content": "ok"}]
        assert result[0].response_logprobs is not None
        assert result[0].response_logprobs.dtype == np.float32

    def test_tools_are_stored_once_for_continued_calls(self, store: Store) -> None:
        def tool(name: str) -> dict[str, Any]:
            parameters = {"type": "object", "properties": {name: {"maximum": 2**70}, "a": {}}}
            return {"type": "function", "function": {"name": name, "parameters": parameters}}

        rollout_id = f"{new_batch(store)}.0.0"
        ids = [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([1, 2, 3, 4, 7], [8]), ([9], [9]), ([9, 9, 1], [2])]
        shown = [*(["look"] for _ in range(3)), ["look", "put"], ["put"], []]
        recorded = [_call(index, *each) for index, each in enumerate(ids)]
        # a call without ids continues no other
        recorded.append(replace(_call(5, [], []), prompt_ids=None, response_ids=None, response_logprobs=None))
        log = trajectories.CallLog(rollout_id, 1)
        for call, names in zip(recorded, shown, strict=True):
            call.tools = [tool(name) for name in names]
            row = log.row(call)
            store.write(lambda connection, row=row: trajectories.record_call(connection, row))  # type: ignore[misc]
        assert recorded[0].tools is recorded[1].tools is recorded[2].tools, "held once"
        kept = store.read(lambda connection: trajectories.calls(connection, rollout_id))
        continued = (1, 2)
        for call, names in zip(kept, shown, strict=True):
            assert call.tools == (None if call.index in continued else [tool(name) for name in names]), call.index
        by_call = tools_by_call(kept)
        assert [[each["function"]["name"] for each in by_call[index]] for index in range(6)] == shown
        properties = by_call[2][0]["function"]["parameters"]["properties"]
        assert list(properties) == ["look", "a"], "the order of a schema is part of the prompt"

    def test_calls_with_reordered_schemas_have_separate_tools(self, store: Store) -> None:
        log = trajectories.CallLog("r", 1)
        first, second = _call(0, [1], [2]), _call(1, [1, 2, 3], [4])
        first.tools, second.tools = [{"a": 1, "b": 2}], [{"b": 2, "a": 1}]
        rows = [log.row(call) for call in (first, second)]
        assert [list(row["tools"][0]) for row in rows] == [["a", "b"], ["b", "a"]]

    @pytest.mark.parametrize("stop_reason", [None, "</s>", 151645, "151645"])
    def test_all_fields_of_a_call_are_read_back(self, store: Store, stop_reason: str | int | None) -> None:
        rollout_id = f"{new_batch(store)}.0.0"
        call = _call(0, [1], [2, 3])
        call.versions = (VersionSpan("3", 0, 1), VersionSpan("step-4", 1, 2))
        call.stop_reason, call.n_cached_tokens, call.n_invalid, call.mismatch = stop_reason, 0, 1, 5
        call.begins = "rewritten: message 3"
        row = trajectories.CallLog(rollout_id, 1).row(call)
        store.write(lambda connection: trajectories.record_call(connection, row))
        (model_call,) = store.read(lambda connection: trajectories.calls(connection, rollout_id))
        for name in ("versions", "stop_reason", "n_cached_tokens", "n_invalid", "mismatch", "begins"):
            assert getattr(model_call, name) == getattr(call, name), name
        store.write(lambda connection: trajectories.record_call(connection, row | {"n_invalid": 2}))
        (model_call,) = store.read(lambda connection: trajectories.calls(connection, rollout_id))
        assert model_call.n_invalid == 2, "known only once its tool calls were looked at"

    def test_mismatch_of_a_row_is_read_back(self, store: Store) -> None:
        batch_id = new_batch(store)
        rollout_id = f"{batch_id}.0.0"
        off = _call(1, [7], [8])
        off.mismatch = 0
        rows = segments([_call(0, [1], [2]), off])
        store.write(lambda connection: trajectories.store_segments(connection, rollout_id, batch_id, 1, rows))
        place(store, batch_id)
        run_to_end(store, rollout_id)
        result = store.read(lambda connection: trajectories.segments_of(connection, batch_id))[rollout_id]
        assert [(row.mismatch, row.trainable) for row in result] == [(None, True), (0, False)]

    def test_call_is_stored_relative_to_the_longest_prefix(self, store: Store) -> None:
        log = trajectories.CallLog("r", 1)
        prefixes = [
            log.row(_call(index, *ids))["prefix_call"]
            for index, ids in enumerate([([1], [2]), ([1, 2, 3], [4]), ([1, 2, 9], [9]), ([1, 2, 3, 4], []), ([5], [])])
        ]
        assert prefixes == [None, 0, 0, 1, None]
        again = log.row(_call(3, [1, 2, 3, 4], []))
        assert (again["prefix_call"], again["prompt_ids"].tolist()) == (1, [])

    def test_call_without_a_prefix_records_how_it_begins(self, store: Store) -> None:
        log = trajectories.CallLog("r", 1)
        result = [
            log.row(_call(index, *ids))["begins"]
            for index, ids in enumerate([([1], [2]), ([1, 2, 3], [4]), ([1, 9], [9])])
        ]
        assert result[:2] == ["first", ""]
        assert result[2].startswith("rendered again")
        model_call = _call(3, [7], [8])
        model_call.begins = "branch: another conversation"
        assert log.row(model_call)["begins"] == "branch: another conversation"

    def test_calls_are_those_of_the_requested_attempt(self, store: Store) -> None:
        rollout_id = f"{new_batch(store)}.0.0"
        for attempt, token in ((1, 7), (2, 8)):
            row = trajectories.CallLog(rollout_id, attempt).row(_call(0, [1], [token]))
            store.write(lambda connection, row=row: trajectories.record_call(connection, row))  # type: ignore[misc]
        result: tuple[tuple[int | None, int], ...] = ((None, 8), (1, 7), (2, 8))
        for which, token in result:
            (model_call,) = store.read(partial(trajectories.calls, rollout_id=rollout_id, attempt=which))
            assert model_call.response_ids is not None
            assert model_call.response_ids.tolist() == [token]
        assert store.read(lambda connection: trajectories.calls(connection, "nobody")) == []

    def test_segments_are_those_of_the_last_attempt(self, store: Store) -> None:
        batch_id = new_batch(store)
        rollout_id = f"{batch_id}.0.0"
        for attempt, token in ((1, 7), (2, 8)):
            rows = segments([_call(0, [1], [token])])
            store.write(
                lambda connection, attempt=attempt, rows=rows: trajectories.store_segments(  # type: ignore[misc]
                    connection, rollout_id, batch_id, attempt, rows
                )
            )
        assert store.read(lambda connection: trajectories.segments_of(connection, batch_id)) == {}, "it has not ended"
        place(store, batch_id)
        run_to_end(store, rollout_id)
        result = store.read(lambda connection: trajectories.segments_of(connection, batch_id))
        assert [row.response_ids.tolist() for row in result[rollout_id]] == [[8]]


def _call(index: int, prompt: list[int], response: list[int]) -> ModelCall:
    return ModelCall(
        index=index,
        messages=[{"role": "user", "content": "hi"}],
        response={"role": "assistant", "content": "x"},
        finish_reason="stop",
        engine="e",
        started_at=1.0,
        latency_s=0.5,
        n_prompt_tokens=len(prompt),
        n_response_tokens=len(response),
        prompt_ids=token_ids(prompt),
        response_ids=token_ids(response),
        response_logprobs=np.full(len(response), -1.0, np.float32),
    )


class TestNodes:
    def test_leadership_lasts_until_its_lease_ends(self, store: Store) -> None:
        def lead(owner: str, lease_s: float = 60.0) -> bool:
            return store.write(lambda connection: leader.acquire_leadership(connection, "dispatcher", owner, lease_s))

        assert lead("a")
        assert not lead("b")
        assert lead("a", lease_s=-1.0)
        assert lead("b")
        store.write(lambda connection: leader.release_leadership(connection, "dispatcher", "b"))
        assert lead("a")

    def test_one_of_many_concurrent_candidates_leads(self, store: Store) -> None:
        stores = [Store(store.url) for _ in range(6)]

        def lead(number: int, role: str, together: threading.Barrier) -> bool:
            together.wait()
            return stores[number].write(
                lambda connection: leader.acquire_leadership(connection, role, f"o{number}", 60.0)
            )

        try:
            with ThreadPoolExecutor(len(stores)) as threads:
                for turn in range(20):
                    begin = partial(lead, role=f"role{turn}", together=threading.Barrier(len(stores)))
                    assert sum(threads.map(begin, range(len(stores)))) == 1
        finally:
            for each in stores:
                each.close()

    def test_node_is_announced_drained_and_removed(self, store: Store) -> None:
        node = Node(NODE, 10, 1, 2, 3, ["noop"], {"x": 1})
        store.write(lambda connection: nodes.announce(connection, node))
        store.write(lambda connection: nodes.announce(connection, node))
        (result,) = store.read(nodes.listing)
        assert (result.room, result.handlers, result.info, result.state) == (10, ["noop"], {"x": 1}, UP)
        assert 0 <= result.heartbeat_age_s < 10
        assert store.write(lambda connection: nodes.heartbeat(connection, node))
        assert not store.write(lambda connection: nodes.drain(connection, "another"))
        assert store.write(lambda connection: nodes.drain(connection, NODE))
        assert store.read(nodes.listing)[0].state == DRAINING
        store.write(lambda connection: nodes.change(connection, replace(node, state=BROKEN)))
        assert store.write(lambda connection: nodes.heartbeat(connection, node)) == DRAINING, "it was not told yet"
        assert store.read(nodes.listing)[0].state == DRAINING
        store.write(lambda connection: nodes.announce(connection, node))
        assert store.write(lambda connection: nodes.heartbeat(connection, node)) == UP, "it was started again"
        store.write(lambda connection: nodes.remove(connection, NODE))
        assert not store.write(lambda connection: nodes.heartbeat(connection, node))

    def test_undelivered_message_is_sent_again_with_backoff(self, store: Store) -> None:
        announce(store)
        batch_id = new_batch(store)
        place(store, batch_id)
        assert not store.read(placement.any_undelivered), "it was rung just now"
        late = update(rollouts.rollouts).values(resend_at=0.0)
        store.write(lambda connection: connection.execute(late) and None)
        assert store.read(placement.any_undelivered)
        (message,) = store.write(lambda connection: placement.undelivered(connection, 3.0, 10))
        assert message == placement.StageMessage(f"{batch_id}.0.0", 1, Stage.INIT, NODE)
        assert store.write(lambda connection: placement.undelivered(connection, 3.0, 10)) == []

    def test_message_unsent_by_an_absent_broker_is_sent_again_soon(self, store: Store) -> None:
        announce(store)
        batch_id = new_batch(store)
        place(store, batch_id)
        late = update(rollouts.rollouts).values(resend_at=0.0)
        for _ in range(5):
            store.write(lambda connection: connection.execute(late) and None)
            stage_messages = store.write(lambda connection: placement.undelivered(connection, 3.0, 10))
        waits = select(rollouts.rollouts.c.resend_at - db_now())
        assert store.read(lambda connection: connection.execute(waits).scalar_one()) > 30.0
        store.write(lambda connection: placement.mark_unsent(connection, stage_messages, 3.0))
        assert store.read(lambda connection: connection.execute(waits).scalar_one()) <= 3.0

    def test_busy_pool_gets_no_repeated_messages(self, store: Store) -> None:
        announce(store, n_slots=2)
        batch_id = new_batch(store, n=5)
        place(store, batch_id)
        held = [claimed(store, f"{batch_id}.{index}.0", Stage.INIT) for index in range(2)]

        def resent() -> list[str]:
            # hours pass between two rounds
            store.write(lambda connection: connection.execute(update(rollouts.rollouts).values(resend_at=0.0)) and None)
            assert store.read(placement.any_undelivered) == (len(held) < 2)
            return [message.rollout_id for message in store.write(lambda each: placement.undelivered(each, 3.0, 10))]

        assert [resent() for _ in range(50)] == [[]] * 50
        assert advance(store, held.pop())
        assert len(resent()) == 2, "one slot of init is free, and that of run for what went there"
        assert {row.attempt for row in store.read(lambda each: batches.rollouts_of(each, batch_id))} == {1}


class TestWrites:
    def test_failed_write_fails_no_other(self, store: Store) -> None:
        go = threading.Event()

        def wait(connection: Connection) -> None:
            go.wait(600)

        def add(n: int) -> Any:
            url = "http://same" if n == 3 else f"http://{n}"
            values = {"url": url, "model": "", "key": "", "added_by": "", "state": "active", "added_at": float(n)}
            return lambda connection: connection.execute(insert(llm_engines.engines), values) and None

        store.write(add(3))
        futures = [store.submit(wait), *(store.submit(add(n)) for n in range(8))]
        go.set()
        failed = [n - 1 for n, future in enumerate(futures) if future.exception(timeout=30) is not None]
        assert failed == [3]
        assert len(store.read(llm_engines.listing)) == 8

    def test_many_processes_lose_no_write(self, store: Store) -> None:
        import multiprocessing

        context = multiprocessing.get_context("forkserver")
        # it is imported once, not by each of them
        context.set_forkserver_preload([__name__])
        batch_id = new_batch(store, n=200)
        place(store, batch_id)
        jobs = [(store.url, [f"{batch_id}.{i}.0" for i in range(start, 200, 4)]) for start in range(4)]
        with context.Pool(4) as pool:
            assert sum(pool.starmap(_claim_all, jobs)) == 200
        count = select(rollouts.attempts.c.rollout_id)
        assert len(store.read(lambda connection: connection.execute(count).all())) == 200

    def test_invalid_database_address_is_refused(self) -> None:
        for url in ("mysql://x/y", "nonsense", "sqlite://", ""):
            with pytest.raises(InvalidRequest, match="store_url"):
                Store(url)


def _claim_all(url: str, rollout_ids: list[str]) -> int:
    store = Store(url)
    with ThreadPoolExecutor(8) as threads:
        result = list(threads.map(lambda rollout_id: claim(store, rollout_id, Stage.INIT), rollout_ids))
    store.close()
    return sum(each is not None for each in result)
