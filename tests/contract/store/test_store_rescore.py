"""A score is kept, whatever happens to a rescore: only another score can follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farm.client.local import LocalFarm
from farm.ids import RolloutRef
from farm.notifications import Signals
from farm.records.rollout import Failure, Outcome, Rollout, Stage, State
from farm.records.submission import RowRewards
from farm.records.trajectory import Segment, segments
from farm.retry_policy import retry_decision
from farm.store import attempts, batches, cancel_and_rescore, leases, placement, rollouts, trajectories
from farm.store.attempts import RetrySettings
from farm.store.database import Store
from farm.store.reports import audit
from farm.store.rollouts import RunSummary
from tests.contract.store.test_store import NODE, announce, claimed, finish, new_batch, place, run_to_end
from tests.services.wire_clients import model_call

SCORE = 0.75


def scored_batch(store: Store, n: int = 1, n_samples: int = 1, **values: Any) -> str:
    """Return a batch that is completed with SCORE."""
    batch_id = new_batch(store, n, n_samples, **values)
    place(store, batch_id)
    for group in range(n):
        for sample in range(n_samples):
            run_to_end(store, f"{batch_id}.{group}.{sample}", reward=SCORE)
    return batch_id


def rescore(store: Store, id: str) -> list[str]:
    return store.write(lambda connection: cancel_and_rescore.rescore(connection, RolloutRef.of(id)))


def cancel(store: Store, id: str) -> list[str]:
    return store.write(lambda connection: cancel_and_rescore.cancel(connection, RolloutRef.of(id)))


def all_rollouts(store: Store, batch_id: str) -> list[Rollout]:
    return store.read(lambda connection: batches.rollouts_of(connection, batch_id))


def end(store: Store, batch_id: str, kind: str, retryable: bool = True) -> None:
    """End the queued attempt at `.0.0` by a failure."""
    place(store, batch_id)
    now = store.read(lambda connection: batches.rollout(connection, f"{batch_id}.0.0"))
    held = claimed(store, now.rollout_id, Stage.EVAL, now.attempt)
    failure, decision = Failure(kind, "broken"), retry_decision(kind, retryable)
    store.write(lambda connection: attempts.end_attempt(connection, held, failure, decision, RetrySettings(0.0, 60.0)))


def _queued(store: Store, batch_id: str) -> None:
    cancel(store, batch_id)


def _under_way(store: Store, batch_id: str) -> None:
    place(store, batch_id)
    held = claimed(store, f"{batch_id}.0.0", Stage.EVAL, 2)
    cancel(store, batch_id)
    assert not finish(store, held, 0.0), "who scored it has lost it"


def _fails(store: Store, batch_id: str) -> None:
    for _ in range(2):
        end(store, batch_id, Outcome.EVALUATOR_ERROR)


def _fails_for_good(store: Store, batch_id: str) -> None:
    end(store, batch_id, Outcome.HANDLER_ERROR, retryable=False)


def _stale(store: Store, batch_id: str) -> None:
    end(store, batch_id, Outcome.STALE)


def _lost_then_cancelled(store: Store, batch_id: str) -> None:
    place(store, batch_id)
    held = claimed(store, f"{batch_id}.0.0", Stage.EVAL, 2)
    store.write(lambda connection: leases.expire_owner(connection, held.owner))
    failure = Failure(Outcome.LOST, "gone")
    retry_settings = RetrySettings(0.0, 60.0)
    store.write(lambda c: attempts.end_attempt(c, held, failure, retry_decision(Outcome.LOST), retry_settings))
    cancel(store, batch_id)


def _lost_too_often(store: Store, batch_id: str) -> None:
    for _ in range(2):
        end(store, batch_id, Outcome.LOST)


def _twice_then_cancelled(store: Store, batch_id: str) -> None:
    cancel(store, batch_id)
    assert rescore(store, batch_id) == [f"{batch_id}.0.0"]
    cancel(store, f"{batch_id}.0")


def _node_ends_then_cancelled(store: Store, batch_id: str) -> None:
    place(store, batch_id)
    claimed(store, f"{batch_id}.0.0", Stage.EVAL, 2)
    store.write(lambda connection: placement.requeue_all(connection, NODE))
    cancel(store, f"{batch_id}.0.0")


def _plain_failure(store: Store, batch_id: str) -> None:
    place(store, batch_id)
    held = claimed(store, f"{batch_id}.0.0", Stage.EVAL, 2)
    assert store.write(lambda c: rollouts.fail(c, held, Failure(Outcome.EVALUATOR_ERROR, "broken"), {}))


WAYS: list[Callable[[Store, str], None]] = [
    _queued,
    _under_way,
    _fails,
    _fails_for_good,
    _stale,
    _lost_then_cancelled,
    _lost_too_often,
    _twice_then_cancelled,
    _node_ends_then_cancelled,
    _plain_failure,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_score_survives_a_rescore_without_result(store: Store, way: Callable[[Store, str], None]) -> None:
    announce(store)
    batch_id = scored_batch(store, max_attempts=2, max_losses=1)
    (before,) = all_rollouts(store, batch_id)
    assert rescore(store, batch_id) == [before.rollout_id]
    way(store, batch_id)
    (after,) = all_rollouts(store, batch_id)
    assert (after.state, after.outcome, after.reward) == (State.COMPLETED, before.outcome, SCORE)
    assert (after.failure, after.trainable, after.n_turns) == (None, True, before.n_turns)
    assert after.cursor > before.cursor, "who streams the batch is given it again"
    assert [score.value for score in store.read(lambda c: batches.rewards_of(c, before.rollout_id))] == [SCORE]
    assert store.read(lambda connection: audit.violations(connection, batch_id)) == []
    assert store.read(lambda connection: audit.conservation(connection, batch_id)).batch.n_completed == 1
    # and it can still be scored again
    assert rescore(store, batch_id) == [before.rollout_id]
    place(store, batch_id)
    assert finish(store, claimed(store, before.rollout_id, Stage.EVAL, after.attempt + 1), 0.5)
    (last,) = all_rollouts(store, batch_id)
    assert (last.reward, last.state) == (0.5, State.COMPLETED)
    assert rescore(store, batch_id) == [before.rollout_id]
    cancel(store, batch_id)
    assert [each.reward for each in all_rollouts(store, batch_id)] == [0.5], "the newest score is the one that stays"
    assert store.read(lambda connection: audit.violations(connection, batch_id)) == []


@pytest.mark.parametrize("what", ["", ".0", ".0.1"])
def test_cancel_ends_unscored_rollouts_and_keeps_scored_ones(store: Store, what: str) -> None:
    batch_id = scored_batch(store, 1, 2)
    other = new_batch(store, 1)
    rescore(store, f"{batch_id}.0.1")
    service = LocalFarm(store, Signals(""), 1000)
    assert service.cancel(f"{batch_id}{what}") == [f"{batch_id}.0.1"]
    assert service.cancel(f"{batch_id}{what}") == []
    assert service.cancel(other) == [f"{other}.0.0"]
    assert [(each.state, each.reward) for each in all_rollouts(store, batch_id)] == [(State.COMPLETED, SCORE)] * 2
    assert [(each.state, each.reward) for each in all_rollouts(store, other)] == [(State.CANCELLED, None)]
    assert [each.cursor for each in service.page(batch_id, 2).rollouts] == [3]


def test_rescore_of_an_unscored_rollout_may_end_without_a_score(store: Store) -> None:
    announce(store)
    batch_id = new_batch(store, max_attempts=1)
    place(store, batch_id)
    rollout_id = f"{batch_id}.0.0"
    for stage, run_summary in ((Stage.INIT, None), (Stage.RUN, RunSummary("submitted", {}))):
        held = claimed(store, rollout_id, stage)
        assert store.write(lambda c, held=held, run_summary=run_summary: rollouts.advance(c, held, 3.0, run_summary))  # type: ignore[misc]
    end(store, batch_id, Outcome.EVALUATOR_ERROR)
    assert rescore(store, batch_id) == [rollout_id]
    cancel(store, batch_id)
    (rollout,) = all_rollouts(store, batch_id)
    assert (rollout.state, rollout.reward) == (State.CANCELLED, None)
    assert store.read(lambda connection: audit.violations(connection, batch_id)) == []


def test_rewards_of_rows_are_those_of_the_newest_score(store: Store) -> None:
    batch_id = scored_batch(store)
    rollout_id = f"{batch_id}.0.0"
    response = {"role": "assistant", "content": "x"}
    calls = [model_call(0, [1, 2], [3, 4], response=response), model_call(1, [9], [8], response=response)]
    calls[0].reward = -1.0
    rows = segments(calls)
    store.write(lambda connection: trajectories.store_segments(connection, rollout_id, batch_id, 1, rows))

    def row_rewards() -> list[tuple[float | None, tuple[tuple[int, float], ...]]]:
        made = store.read(lambda connection: trajectories.segments_of(connection, batch_id, [rollout_id]))[rollout_id]
        assert all(isinstance(row, Segment) for row in made)
        return [(row.reward, row.turn_rewards) for row in made]

    def scored_again(of_rows: RowRewards | None) -> None:
        rescore(store, rollout_id)
        place(store, batch_id)
        attempt = store.read(lambda connection: batches.rollout(connection, rollout_id)).attempt
        held = claimed(store, rollout_id, Stage.EVAL, attempt)
        store.write(lambda connection: rollouts.finish(connection, held, 0.5, {}, "test", None, of_rows))

    assert row_rewards() == [(None, ((1, -1.0),)), (None, ())]
    scored_again(RowRewards(rows={1: 0.0}, turns=((0, 1, 2.0), (1, 0, 3.0))))
    assert row_rewards() == [(None, ((1, 2.0),)), (0.0, ((0, 3.0),))]
    scored_again(RowRewards(rows={0: 4.0}))
    assert row_rewards() == [(4.0, ((1, -1.0),)), (None, ())]
    rescore(store, rollout_id)
    cancel(store, rollout_id)
    assert row_rewards() == [(4.0, ((1, -1.0),)), (None, ())], "what was not scored again keeps its score"
    scored_again(None)
    assert row_rewards() == [(None, ((1, -1.0),)), (None, ())]
