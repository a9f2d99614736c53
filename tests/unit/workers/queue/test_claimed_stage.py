"""A message whose stage cannot be claimed: Celery reports the reason from the store."""

from __future__ import annotations

import pytest
from celery.exceptions import Retry, Terminated

from farm.records.rollout import Failure
from farm.retry_policy import DRAINED, retry_decision
from farm.store import attempts
from farm.store.attempts import RetrySettings
from farm.store.database import Store
from farm.store.reports.stage_ends import AttemptStage
from farm.store.rollouts import Claim
from tests.contract.store.test_store_rescore import cancel
from tests.unit.workers.queue.test_unfinished_stage import begun
from workers.queue.tasks import report_unclaimed


def report(store: Store, claim: Claim) -> None:
    report_unclaimed(store, AttemptStage(claim.rollout_id, claim.attempt, claim.stage))


def test_cancelled_stage_is_revoked(sqlite_store: Store) -> None:
    claim = begun(sqlite_store)
    cancel(sqlite_store, claim.rollout_id)
    with pytest.raises(Terminated, match="cancelled"):
        report(sqlite_store, claim)


def test_requeued_stage_is_a_retry(sqlite_store: Store) -> None:
    claim = begun(sqlite_store)
    ended, settings = Failure(DRAINED, "its node is ending"), RetrySettings(0.0, 60.0)
    sqlite_store.write(lambda held: attempts.end_attempt(held, claim, ended, retry_decision(DRAINED), settings))
    with pytest.raises(Retry, match="its node is ending"):
        report(sqlite_store, claim)


def test_stage_claimed_by_another_message_is_ignored(sqlite_store: Store) -> None:
    report(sqlite_store, begun(sqlite_store))
