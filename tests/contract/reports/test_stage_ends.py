"""The end of each stage in the store: completed, failed, taken away, cancelled, or still running."""

from __future__ import annotations

import pytest

from farm.records.rollout import Failure, Outcome, Stage, State
from farm.retry_policy import DRAINED, RESTARTED, retry_decision
from farm.store import attempts
from farm.store.attempts import RetrySettings
from farm.store.database import Store
from farm.store.reports.stage_ends import AttemptStage, StageEnd, stage_ends
from tests.contract.store.test_store import announce, claimed, new_batch, place, run_to_end
from tests.contract.store.test_store_rescore import cancel, rescore


def end_of(store: Store, rollout_id: str, attempt: int, stage: Stage) -> StageEnd | None:
    attempt_stage = AttemptStage(rollout_id, attempt, stage)
    return store.read(lambda connection: stage_ends(connection, [attempt_stage])).get(attempt_stage)


def state_of(store: Store, rollout_id: str, attempt: int, stage: Stage) -> State | None:
    end = end_of(store, rollout_id, attempt, stage)
    return None if end is None else end.state


@pytest.fixture
def rollout_id(store: Store) -> str:
    announce(store)
    return f"{new_batch(store, max_attempts=1, max_losses=1)}.0.0"


def _begin(store: Store, rollout_id: str, attempt: int = 1) -> None:
    place(store, rollout_id.partition(".")[0])
    claimed(store, rollout_id, Stage.INIT, attempt)


def _end(store: Store, rollout_id: str, cause: str, attempt: int = 1) -> None:
    place(store, rollout_id.partition(".")[0])
    held = claimed(store, rollout_id, Stage.INIT, attempt)
    failure, decision = Failure(cause, f"because of {cause}"), retry_decision(cause)
    store.write(lambda connection: attempts.end_attempt(connection, held, failure, decision, RetrySettings(0.0, 60.0)))


def test_queued_or_active_stage_has_no_end(store: Store, rollout_id: str) -> None:
    assert end_of(store, rollout_id, 1, Stage.INIT) is None
    _begin(store, rollout_id)
    assert end_of(store, rollout_id, 1, Stage.INIT) is None
    assert end_of(store, rollout_id, 1, Stage.RUN) is None
    assert end_of(store, "nothing.0.0", 1, Stage.INIT) is None


def test_completed_stages_stay_completed_after_a_rescore(store: Store, rollout_id: str) -> None:
    place(store, rollout_id.partition(".")[0])
    run_to_end(store, rollout_id)
    rescore(store, rollout_id)
    assert {state_of(store, rollout_id, 1, stage) for stage in Stage} == {State.COMPLETED}


@pytest.mark.parametrize("cause", [DRAINED, Outcome.LOST.value])
def test_lost_or_drained_stage_is_queued_again(store: Store, rollout_id: str, cause: str) -> None:
    _end(store, rollout_id, cause)
    end = end_of(store, rollout_id, 1, Stage.INIT)
    assert end is not None
    assert (end.state, end.message) == (State.QUEUED, f"because of {cause}")
    assert end_of(store, rollout_id, 2, Stage.INIT) is None


def test_loss_beyond_the_limit_is_a_failure(store: Store, rollout_id: str) -> None:
    _end(store, rollout_id, Outcome.LOST.value)
    _end(store, rollout_id, Outcome.LOST.value, 2)
    assert [state_of(store, rollout_id, n, Stage.INIT) for n in (1, 2)] == [State.QUEUED, State.FAILED]


@pytest.mark.parametrize("cause", [Outcome.SANDBOX_ERROR.value, Outcome.STALE.value, RESTARTED])
def test_failing_stage_has_failed(store: Store, rollout_id: str, cause: str) -> None:
    _end(store, rollout_id, cause)
    assert state_of(store, rollout_id, 1, Stage.INIT) is State.FAILED


def test_cancel_ends_the_current_and_all_later_stages(store: Store, rollout_id: str) -> None:
    cancel(store, rollout_id)
    assert state_of(store, rollout_id, 1, Stage.INIT) is State.CANCELLED
    other = f"{new_batch(store)}.0.0"
    _begin(store, other)
    cancel(store, other)
    assert [state_of(store, other, 1, stage) for stage in Stage] == [State.CANCELLED] * 3


def test_later_stage_of_a_requeued_attempt_is_queued(store: Store, rollout_id: str) -> None:
    _end(store, rollout_id, DRAINED)
    assert state_of(store, rollout_id, 1, Stage.EVAL) is State.QUEUED
