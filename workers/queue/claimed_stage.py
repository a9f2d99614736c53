"""A stage held by one Celery task: claimed, its lease renewed, and its attempt closed however the body ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from celery import Task
from celery.exceptions import Retry, Terminated
from sqlalchemy import Connection

from farm.ids import group_id
from farm.observing.process_log import log_about
from farm.records.rollout import Stage, State
from farm.store.database import Store
from farm.store.reports.stage_ends import AttemptStage, stage_ends
from farm.store.rollouts import Claim
from workers.plugins.plugin_faults import is_exhausted
from workers.process.claimed_work import ClaimedWork, StopReason
from workers.process.worker import Worker, worker
from workers.queue.unfinished_stage import StageHandedBack, UnfinishedStage
from workers.stages import stage_functions
from workers.stages.redaction import in_use
from workers.stages.run_clock import limit_s
from workers.stages.stage_job import Problem, StageJob

T = TypeVar("T")
log = logging.getLogger(__name__)

UNCLAIMED = "nothing to do: another message runs it"
"""The result of a task whose stage another has or had: a message is only a notification, and may come twice."""
_DISCARD_S = 60.0


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
            problem = me.problem(job)
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
