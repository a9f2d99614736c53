"""The end of a claimed stage that was not played to its end: its attempt is closed, and its Celery task reports why.

The store is written first, and alone says what is true.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import NoReturn, assert_never

from celery.exceptions import Retry, Terminated

from farm.errors import AgentError, EvaluatorError, HandlerError, RolloutError
from farm.ids import group_id
from farm.records.rollout import Failure, Outcome, Stage
from farm.retry_policy import (
    DRAINED,
    Budget,
    RetryDecision,
    cause_of,
    overdue_error,
    retry_decision,
    retry_decision_for,
)
from farm.store import attempts
from farm.store.attempts import RetrySettings
from farm.store.rollouts import Claim
from workers.plugins.plugin_faults import described, is_exhausted
from workers.process.claimed_work import StopReason
from workers.process.watchdog import Hang
from workers.process.worker import Worker
from workers.queue.shutdown_signals import shutdown_requested
from workers.stages.redaction import in_use

log = logging.getLogger(__name__)


class StageFailed(Exception):
    """The exception of a Celery task whose stage broke, once that is stored."""


class StageHandedBack(Exception):
    """A stage was stopped or taken away and is played again: the reason of its Celery task's retry."""


class UnfinishedStage:
    """A stage that broke, was stopped, or lost its claim.

    Each method raises what Celery, and so Flower, is to report: StageFailed, Terminated if the rollout was cancelled,
    and Retry if the stage is played again.
    """

    def __init__(self, worker: Worker, claim: Claim) -> None:
        self._worker = worker
        self._claim = claim
        self._where = f"{claim.rollout_id}: stage {claim.stage}"

    def stopped(self, reason: StopReason, error: BaseException) -> NoReturn:
        """End one that was stopped from outside. What breaks because it is stopped has not failed.

        What was cancelled or lost is closed already; what is drained goes to another node.
        """
        where, claim = self._where, self._claim
        log.info("Rollout %s, stopped (%s), ended with %s", where, reason, described(error))
        match reason:
            case StopReason.CANCELLED | StopReason.LOST:
                pass
            case StopReason.DRAINED:
                self._close(DRAINED, f"{where} was handed back, as node {claim.node} was drained")
            case StopReason.STALLED:
                self._close(DRAINED, f"{where} was handed back, as its worker hangs and ends")
            case StopReason.HUNG:
                self._close(Outcome.LOST, f"{where} was lost, as its worker hung, it may be by its doing")
            case StopReason.OVERDUE:
                self._fail(overdue_error(claim.stage, f"{where} went on beyond its deadline and was stopped"))
            case _:
                assert_never(reason)
        self.taken_away(reason)

    def broke(self, error: BaseException) -> NoReturn:
        """End one that raised by itself."""
        if is_exhausted(error):
            self._worker.watchdog.exhausted(error)
            why = f"its worker has no threads, descriptors or memory left ({described(error)})"
            self._close(Outcome.LOST, f"{self._where} was lost, as {why}")
            self.taken_away(StopReason.LOST)
        # a stage that ended its worker is not excused by its worker's end
        self._fail(self._classified(error), by_itself=isinstance(error, Hang))

    def taken_away(self, reason: StopReason) -> NoReturn:
        """Report one that wrote nothing, or handed back what it held."""
        if reason is StopReason.CANCELLED:
            raise Terminated(reason.value)
        what = f"{self._where} was stopped ({reason}); it is played again if that is still wanted"
        raise Retry(what, StageHandedBack(what))

    def _fail(self, error: RolloutError, *, by_itself: bool = False) -> NoReturn:
        if error.retryable and not by_itself and (self._worker.leases.draining or shutdown_requested()):
            # the signal that ends a node may end its helpers in the same moment
            what = f"{self._where} broke as its node was ended: {error}"
            self._close(DRAINED, what)
            raise Retry(what, StageHandedBack(what))
        decision = retry_decision_for(error)
        if self._close(cause_of(error), str(error), decision) and decision.of_node:
            instance = group_id(self._claim.batch_id, self._claim.group_index)
            self._worker.breaker.record_failure(instance, str(error))
        raise StageFailed(in_use.redacted(f"{error.kind}: {error}")) from None

    def _close(self, cause: str, message: str, decision: RetryDecision | None = None) -> bool:
        """Close the attempt by its cause, and notify those who wait for what follows. False if the claim is gone."""
        worker, claim, message = self._worker, self._claim, in_use.redacted(message)
        decision = decision or retry_decision(cause)
        end_attempt = partial(
            attempts.end_attempt,
            held=claim,
            failure=Failure(cause, message),
            decision=decision,
            retry_settings=RetrySettings(worker.options.retry_s, worker.options.node_timeout_s),
        )
        end = worker.store.write(end_attempt, batch_id=claim.batch_id, rollout_id=claim.rollout_id)
        if end is None:
            return False
        level = logging.INFO if decision.budget in {Budget.UNCOUNTED, Budget.RESTARTS} else logging.WARNING
        log.log(level, "%s (attempt %d, %s)", end.failure.message, claim.attempt, end.in_words)
        if end.again_in_s is None:
            worker.signals.ended(claim.batch_id)
        else:
            worker.signals.wake()
        return True

    def _classified(self, error: BaseException) -> RolloutError:
        """Return an error of the stages, which is classified, as it is; any other is a fault of the farm itself."""
        stage, where = self._claim.stage, self._where
        if isinstance(error, RolloutError):
            return error
        if isinstance(error, Hang):
            message = f"{where}: {error}"
            return HandlerError(message) if stage is Stage.INIT and error.in_loop else overdue_error(stage, message)
        kind = EvaluatorError if stage is Stage.EVAL else AgentError
        if isinstance(error, asyncio.CancelledError):
            return kind(f"{where} was cancelled from within")
        log.error("Rollout %s: internal error", self._claim.rollout_id, exc_info=error)
        return kind(f"{self._claim.rollout_id}: internal error: {described(error)}")
