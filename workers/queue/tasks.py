"""The three Celery tasks of a rollout: claim the stage, run it, write the result.

A message is only a notification. A task that gets no claim cuts the chain and ends; a stage that fails cuts the chain
after it has written the reason. In every case the row ends up advanced, finished or requeued, or its lease expires.

Each task ends in Celery, and thus in Flower, like its stage: SUCCESS with a line about the result, FAILURE with the
error, RETRY if it was requeued or lost, REVOKED if it was cancelled. This happens after the write to the store, which
is the only source of truth.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn, TypeVar, assert_never

from celery import Task
from celery.exceptions import Retry, Terminated
from sqlalchemy import Connection

from farm.errors import AgentError, EvaluatorError, HandlerError, RolloutError
from farm.ids import group_id
from farm.observing.process_log import log_about
from farm.records.experts.expert_stretches import ExpertStretch, stretches_of
from farm.records.rollout import Failure, Outcome, Stage, State
from farm.records.trajectory import ROLE, ModelCall, Segment, version_range
from farm.retry_policy import (
    DRAINED,
    Budget,
    RetryDecision,
    cause_of,
    overdue_error,
    retry_decision,
    retry_decision_for,
)
from farm.row_builders import build_rows
from farm.scheduler.broker import TASKS, enqueue_next
from farm.settings import settings
from farm.store import attempts, rollouts, trajectories
from farm.store.attempts import RetrySettings
from farm.store.database import Store
from farm.store.placement import StageMessage
from farm.store.reports.stage_ends import AttemptStage, stage_ends
from farm.store.rollouts import Claim, RunSummary
from workers.config import SandboxConfig
from workers.plugins.interfaces import Submission
from workers.plugins.plugin_faults import described, is_exhausted, plugin_call
from workers.process.lease_renewal import ClaimedWork, StopReason
from workers.process.supervision import note_without_sandbox
from workers.process.watchdog import Hang
from workers.process.worker import Worker, worker
from workers.queue.app import app, shutdown_requested
from workers.sandboxes.lifecycle import layers
from workers.stages import stage_functions
from workers.stages.redaction import in_use
from workers.stages.run_clock import limit_s
from workers.stages.run_stage import RunResult
from workers.stages.stage_functions import rewards_of_rows, with_calls
from workers.stages.stage_job import Problem, StageJob, resolve_problem

log = logging.getLogger(__name__)

_STAGE_OF = {name: stage for stage, name in TASKS.items()}
T = TypeVar("T")

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
    own_worker = worker()
    rest, task.request.chain = task.request.chain, None
    claim = _claim(own_worker, rollout_id, attempt, stage)
    if claim is None:
        report_unclaimed(own_worker.store, AttemptStage(rollout_id, attempt, stage))
        yield None
        return
    unfinished = UnfinishedStage(own_worker, claim)
    with own_worker.leases.hold(claim) as work, work.clock.as_current(), ExitStack() as stack:
        stack.enter_context(log_about(rollout_id, attempt=attempt, stage=stage.value))
        try:
            job = own_worker.job(claim)
            stack.enter_context(in_use.held(job.all_secrets))
            own_worker.fetch_archive(job)
            problem = resolve_problem(job)
            work.limit_s = limit_s(stage, problem.job.limits) + own_worker.options.overdue_s
            yield ClaimedStage(own_worker, claim, problem, work)
        except ClaimLost:
            unfinished.taken_away(work.reason or StopReason.LOST)
        except BaseException as error:
            if work.reason is not None:
                unfinished.stopped(work.reason, error)
            unfinished.broke(error)
        task.request.chain = rest
        own_worker.breaker.record_success(group_id(claim.batch_id, claim.group_index))


def _claim(own_worker: Worker, rollout_id: str, attempt: int, stage: Stage) -> Claim | None:
    try:
        return own_worker.claim(rollout_id, attempt, stage)
    except Exception as error:
        if is_exhausted(error):
            own_worker.watchdog.exhausted(error)
        raise


def report_unclaimed(store: Store, stage: AttemptStage) -> None:
    """Raise the exception for Celery about a stage that was requeued or cancelled before it could be claimed."""
    end = store.read(lambda connection: stage_ends(connection, [stage])).get(stage)
    if end is not None and end.state is State.CANCELLED:
        raise Terminated(StopReason.CANCELLED.value)
    if end is not None and end.state is State.QUEUED:
        raise Retry(end.message, StageHandedBack(end.message))


class StageTask(Task):  # type: ignore[misc]
    """A stage. Its chain continues by a message for the next one, and an unavailable broker does not fail this one.

    It is a task of the workers' app only: a shared one would replace the dispatcher's, too, which must see send errors.
    """

    throws = (StageFailed, Terminated)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> None:
        rollout_id, attempt = args
        message = StageMessage(rollout_id, attempt, _STAGE_OF[self.name], settings().node)
        links = reversed(options["chain"])
        task_ids = [options["task_id"], *(link["options"]["task_id"] for link in links)]
        try:
            enqueue_next(self.app, message, task_ids, options["root_id"], options["parent_id"])
        except Exception as error:  # the transports raise anything from OSError to their own
            log.warning("Broker does not answer (%s); %s%s will be sent again", error, self.name, args)


@app.task(name=TASKS[Stage.INIT], bind=True, base=StageTask, shared=False)  # type: ignore[untyped-decorator]
def init_sandbox(self: Task, rollout_id: str, attempt: int) -> str:
    """Start the rollout's sandbox."""
    with claimed_stage(self, Stage.INIT, rollout_id, attempt) as stage:
        if stage is None:
            return UNCLAIMED
        started = stage.run(stage_functions.init(stage.problem))
        advance = partial(rollouts.advance, held=stage.claim, resend_after_s=stage.worker.options.resend_after_s)
        try:
            stage.write(advance)
        except ClaimLost:
            stage.discard_sandbox()
            raise
        if not started and not stage.job.batch.agent and stage.problem.handler.without_sandbox:
            note_without_sandbox(stage.worker.options.scratch, stage.job.data_source)
        return stage.ended("advanced to run")


@app.task(name=TASKS[Stage.RUN], bind=True, base=StageTask, shared=False)  # type: ignore[untyped-decorator]
def run_agent(self: Task, rollout_id: str, attempt: int) -> str:
    """Run the agent."""
    with claimed_stage(self, Stage.RUN, rollout_id, attempt) as stage:
        if stage is None:
            return UNCLAIMED
        recorder = stage.worker.recorder(stage.claim)
        with stage.worker.policy(stage.job) as policy, stage.worker.models(stage.job) as models:
            stage.work.excused_s = lambda: policy.paused_s
            left = stage.worker.layers(stage.claim)
            run_result = stage.run(
                stage_functions.run(stage.problem, policy, recorder.record, recorder.keep, left, models)
            )
        calls = recorder.in_order()
        trained = stage_functions.trained_calls(stage.problem, calls)
        # the rollout may be unfit to be kept: training on it would be worse than losing it
        builder = stage.job.batch.row_builder
        with plugin_call(rollout_id, f"row builder {builder!r}", AgentError):
            rows = build_rows(builder, trained, calls)
        run_result = replace(run_result, submission=with_calls(stage.problem, run_result.submission, calls, rows))
        summary = _summary(run_result, [call for call in calls if ROLE not in call.labels], rows)
        taken = {call.index for call in trained}
        others = [call for call in calls if call.index not in taken]
        stretches = [stretches_of(row, calls) for row in rows]
        resend_after_s = stage.worker.options.resend_after_s
        stage.write(partial(_advance_with_rows, stage.claim, resend_after_s, summary, rows, stretches, others))
        return stage.ended(f"advanced to eval: {run_result.outcome.value}, {len(calls)} turns")


@app.task(name=TASKS[Stage.EVAL], bind=True, base=StageTask, shared=False)  # type: ignore[untyped-decorator]
def evaluate(self: Task, rollout_id: str, attempt: int) -> str:
    """Evaluate the submission."""
    with claimed_stage(self, Stage.EVAL, rollout_id, attempt) as stage:
        if stage is None:
            return UNCLAIMED
        claim = stage.claim
        submission = Submission.model_validate(claim.submission or {})
        with stage.worker.models(stage.job) as models:
            score, name = stage.run(
                stage_functions.evaluate(stage.problem, submission, stage.worker.layers(claim), models)
            )
        of_rows = rewards_of_rows(rollout_id, submission, score, name)
        finish = partial(
            rollouts.finish,
            held=claim,
            value=score.value,
            details=score.details,
            evaluator=name,
            named=score.rewards,
            of_rows=of_rows,
        )
        stage.write(finish, claim.batch_id)
        if submission.layer is not None:
            layers.discard(SandboxConfig.of(stage.worker.options), submission.layer.name)
        stage.worker.signals.ended(claim.batch_id)
        return stage.ended(f"reward {score.value:g}, {claim.policy_outcome}")


def _summary(run_result: RunResult, calls: Sequence[ModelCall], rows: Sequence[Segment]) -> RunSummary:
    oldest, newest = version_range(calls)
    return RunSummary(
        policy_outcome=run_result.outcome.value,
        submission=run_result.submission.model_dump(mode="json"),
        n_turns=len(calls),
        n_response_tokens=sum(call.n_response_tokens for call in calls),
        n_invalid_actions=sum(call.n_invalid for call in calls),
        n_mismatches=sum(call.mismatch is not None for call in calls),
        n_segments=len(rows),
        version_min=oldest,
        version_max=newest,
    )


def _advance_with_rows(
    claim: Claim,
    resend_after_s: float,
    summary: RunSummary,
    rows: Sequence[Segment],
    stretches: Sequence[Sequence[ExpertStretch]],
    untrained: Sequence[ModelCall],
    connection: Connection,
) -> bool:
    if not rollouts.advance(connection, claim, resend_after_s, summary):
        return False
    trajectories.mark_untrained(connection, claim.rollout_id, claim.attempt, untrained)
    trajectories.store_segments(connection, claim.rollout_id, claim.batch_id, claim.attempt, rows, stretches)
    return True
