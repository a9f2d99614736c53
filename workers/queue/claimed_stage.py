"""A stage held by one Celery task: claimed, its lease renewed, and its attempt closed however the body ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar, assert_never

from celery import Task
from celery.exceptions import Retry, Terminated
from sqlalchemy import Connection

from farm.errors import AgentError, EvaluatorError, HandlerError, RolloutError
from farm.ids import group_id
from farm.observing.process_log import log_about
from farm.records.rollout import Failure, Outcome, Stage, State
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
from farm.store.database import Store
from farm.store.reports.stage_ends import AttemptStage, stage_ends
from farm.store.rollouts import Claim
from workers.plugins.plugin_faults import described, is_exhausted
from workers.process.lease_renewal import ClaimedWork, StopReason
from workers.process.watchdog import Hang
from workers.process.worker import Worker, worker
from workers.queue.app import shutdown_requested
from workers.stages import stage_functions
from workers.stages.redaction import in_use
from workers.stages.run_clock import limit_s
from workers.stages.stage_job import Problem, StageJob, resolve_problem

T = TypeVar("T")
log = logging.getLogger(__name__)

UNCLAIMED = "nothing to do: another message runs it"
"""The result of a task whose stage another has or had: a message is only a notification, and may come twice."""
_DISCARD_S = 60.0


class StageFailed(Exception):
    """The exception of a Celery task whose stage failed, raised after the failure was stored."""


class StageHandedBack(Exception):
    """A stage was stopped or taken away and will run again: the reason of its Celery task's retry."""


class UnfinishedStage:
    """A stage that failed, was stopped, or lost its claim.

    Each method raises the exception for Celery, and thus Flower: StageFailed, Terminated if the rollout was cancelled,
    or Retry if the stage will run again.
    """

    def __init__(self, worker: Worker, claim: Claim) -> None:
        self._worker = worker
        self._claim = claim
        self._where = f"{claim.rollout_id}: stage {claim.stage}"

    def stopped(self, reason: StopReason, error: BaseException) -> NoReturn:
        """End a stage that was stopped from outside. An error caused by the stop is not a failure.

        A cancelled or lost one is closed already; a drained one goes to another node.
        """
        where, claim = self._where, self._claim
        log.info("Rollout %s, stopped (%s), ended with %s", where, reason, described(error))
        match reason:
            case StopReason.CANCELLED | StopReason.LOST:
                pass
            case StopReason.DRAINED:
                self._close(DRAINED, f"{where} was requeued because node {claim.node} was drained")
            case StopReason.STALLED:
                self._close(DRAINED, f"{where} was requeued because its worker hangs and ends")
            case StopReason.HUNG:
                self._close(Outcome.LOST, f"{where} was lost because its worker hung, possibly caused by this rollout")
            case StopReason.OVERDUE:
                self._fail(overdue_error(claim.stage, f"{where} exceeded its deadline and was stopped"))
            case _:
                assert_never(reason)
        self.taken_away(reason)

    def broke(self, error: BaseException) -> NoReturn:
        """End a stage that raised an error itself."""
        if is_exhausted(error):
            self._worker.watchdog.exhausted(error)
            why = f"its worker has no threads, descriptors or memory left ({described(error)})"
            self._close(Outcome.LOST, f"{self._where} was lost because {why}")
            self.taken_away(StopReason.LOST)
        # a stage that ended its worker is not excused by its worker's end
        self._fail(self._classified(error), by_itself=isinstance(error, Hang))

    def taken_away(self, reason: StopReason) -> NoReturn:
        """Report a stage that wrote nothing, or was requeued."""
        if reason is StopReason.CANCELLED:
            raise Terminated(reason.value)
        what = f"{self._where} was stopped ({reason}); it runs again if its result is still wanted"
        raise Retry(what, StageHandedBack(what))

    def _fail(self, error: RolloutError, *, by_itself: bool = False) -> NoReturn:
        if error.retryable and not by_itself and (self._worker.leases.draining or shutdown_requested()):
            # the signal that ends a node may end its helpers at the same time
            what = f"{self._where} failed while its node was shut down: {error}"
            self._close(DRAINED, what)
            raise Retry(what, StageHandedBack(what))
        decision = retry_decision_for(error)
        if self._close(cause_of(error), str(error), decision) and decision.of_node:
            instance = group_id(self._claim.batch_id, self._claim.group_index)
            self._worker.breaker.record_failure(instance, str(error))
        raise StageFailed(in_use.redacted(f"{error.kind}: {error}")) from None

    def _close(self, cause: str, message: str, decision: RetryDecision | None = None) -> bool:
        """Close the attempt with its cause, and notify waiting processes. Returns False if the claim is gone."""
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
        """Return an error that the stages have classified; any other is a fault of the farm itself."""
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
        return kind(f"{self._claim.rollout_id}: internal error of the farm: {described(error)}")


class ClaimLost(Exception):
    """The claim was taken away before the result of its stage was written."""


@dataclass(frozen=True, slots=True)
class ClaimedStage:
    """A claim, its job, and the running work, which is cancelled if the claim is lost."""

    worker: Worker
    claim: Claim
    problem: Problem
    work: ClaimedWork
    began: float = field(default_factory=time.monotonic)

    @property
    def job(self) -> StageJob:
        return self.problem.job

    def run(self, stage: Coroutine[Any, Any, T]) -> T:
        """Run the stage on the worker's event loop and wait for its end. Raises the stage's error."""
        return self.worker.loop.run(stage, self.work.working)

    def write(self, transition: Callable[[Connection], bool], batch_id: str = "") -> None:
        """Make the transition that ends the stage. `batch_id` names the batch if the transition may end it.

        Raises ClaimLost if it does not apply.
        """
        if not self.worker.store.write(transition, batch_id=batch_id, rollout_id=self.claim.rollout_id):
            raise ClaimLost

    def ended(self, outcome: str) -> str:
        """Log the end of the stage after it was written, with its result. Returns the result for Celery to show."""
        log.info("Stage ended after %.1f s: %s", time.monotonic() - self.began, outcome)
        return outcome

    def discard_sandbox(self) -> None:
        """Stop the sandbox started for a lost claim; otherwise the node's sweep removes it."""
        with suppress(TimeoutError):
            self.worker.loop.run(stage_functions.discard(self.problem), within_s=_DISCARD_S)


@contextmanager
def claimed_stage(task: Task, stage: Stage, rollout_id: str, attempt: int) -> Iterator[ClaimedStage | None]:
    """Claim a stage and hold it while the body runs; None if another task has or had it.

    The task's chain continues only if the body ends without an error. Otherwise the attempt is closed with the cause,
    and StageFailed, Retry or Terminated is raised for Celery to report.
    """
    me = worker()
    rest, task.request.chain = task.request.chain, None
    claim = _claim(me, rollout_id, attempt, stage)
    if claim is None:
        report_unclaimed(me.store, AttemptStage(rollout_id, attempt, stage))
        yield None
        return
    unfinished = UnfinishedStage(me, claim)
    with me.leases.hold(claim) as work, work.clock.as_current(), ExitStack() as stack:
        stack.enter_context(log_about(rollout_id, attempt=attempt, stage=stage.value))
        try:
            job = me.job(claim)
            stack.enter_context(in_use.held(job.all_secrets))
            me.fetch_archive(job)
            problem = resolve_problem(job)
            work.limit_s = limit_s(stage, problem.job.limits) + me.options.overdue_s
            yield ClaimedStage(me, claim, problem, work)
        except ClaimLost:
            unfinished.taken_away(work.reason or StopReason.LOST)
        except BaseException as error:
            if work.reason is not None:
                unfinished.stopped(work.reason, error)
            unfinished.broke(error)
        task.request.chain = rest
        me.breaker.record_success(group_id(claim.batch_id, claim.group_index))


def _claim(me: Worker, rollout_id: str, attempt: int, stage: Stage) -> Claim | None:
    try:
        return me.claim(rollout_id, attempt, stage)
    except Exception as error:
        if is_exhausted(error):
            me.watchdog.exhausted(error)
        raise


def report_unclaimed(store: Store, stage: AttemptStage) -> None:
    """Raise the exception for Celery about a stage that was requeued or cancelled before it could be claimed."""
    end = store.read(lambda connection: stage_ends(connection, [stage])).get(stage)
    if end is not None and end.state is State.CANCELLED:
        raise Terminated(StopReason.CANCELLED.value)
    if end is not None and end.state is State.QUEUED:
        raise Retry(end.message, StageHandedBack(end.message))
