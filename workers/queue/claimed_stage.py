"""A stage while one Celery task holds it: claimed, its lease renewed, and its attempt closed however the body ends."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from celery import Task
from sqlalchemy import Connection

from farm.ids import group_id
from farm.records.rollout import Stage
from farm.store.rollouts import Claim
from workers import stages
from workers.plugin_faults import is_exhausted
from workers.process.claimed_work import ClaimedWork, StopReason
from workers.process.worker import Worker, worker
from workers.queue.unfinished_stage import UnfinishedStage
from workers.redaction import in_use
from workers.run_clock import limit_s
from workers.stage_job import StageJob

T = TypeVar("T")

UNCLAIMED = "nothing to do: it was played, cancelled or taken away"
"""The result of a task that got no claim: a message is only a notification."""
_DISCARD_S = 60.0


class ClaimLost(Exception):
    """The claim was taken away before the result of its stage was written."""


@dataclass(frozen=True, slots=True)
class ClaimedStage:
    """A claim, its job, and the work on it, which whoever takes the claim away stops."""

    worker: Worker
    claim: Claim
    job: StageJob
    work: ClaimedWork

    def play(self, stage: Coroutine[Any, Any, T]) -> T:
        """Run the stage on the worker's event loop, and wait for its end. Raises what it raises."""
        return self.worker.loop.run(stage, self.work.working)

    def write(self, transition: Callable[[Connection], bool], batch_id: str = "") -> None:
        """Make the transition that ends the stage; `batch_id` names the batch if that may end by it.

        Raises ClaimLost if it does not apply.
        """
        if not self.worker.store.write(transition, batch_id=batch_id, rollout_id=self.claim.rollout_id):
            raise ClaimLost

    def discard_sandbox(self) -> None:
        """Stop the sandbox that was started for a claim which is gone; the node's sweep removes it otherwise."""
        with suppress(TimeoutError):
            self.worker.loop.run(stages.discard(self.job), within_s=_DISCARD_S)


@contextmanager
def claimed_stage(task: Task, stage: Stage, rollout_id: str, attempt: int) -> Iterator[ClaimedStage | None]:
    """Claim a stage and hold it while the body runs; None if it cannot be claimed.

    The task's chain goes on only if the body ends without an error. Otherwise the attempt is closed by what ended it,
    and StageFailed, Retry or Terminated is raised, by which Celery reports that.
    """
    me = worker()
    rest, task.request.chain = task.request.chain, None
    claim = _claim(me, rollout_id, attempt, stage)
    if claim is None:
        yield None
        return
    unfinished = UnfinishedStage(me, claim)
    with me.leases.hold(claim) as work, work.clock.as_current(), ExitStack() as stack:
        try:
            stack.enter_context(in_use.held(me.job(claim).secrets))
            job = me.resolved_job(claim)
            work.limit_s = limit_s(stage, job.limits) + me.options.overdue_s
            yield ClaimedStage(me, claim, job, work)
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
