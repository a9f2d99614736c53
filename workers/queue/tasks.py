"""The three Celery tasks of a rollout: claim the stage, run it, write the result.

A message is only a notification. A task that gets no claim cuts the chain and ends; a stage that fails cuts the chain
after it has written the reason. In every case the row ends up advanced, finished or requeued, or its lease expires.

Each task ends in Celery, and thus in Flower, like its stage: SUCCESS with a line about the result, FAILURE with the
error, RETRY if it was requeued or lost, REVOKED if it was cancelled. This happens after the write to the store, which
is the only source of truth.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from celery import Task
from celery.exceptions import Terminated
from sqlalchemy import Connection

from farm.errors import AgentError
from farm.records.experts.expert_places import ExpertStretch, places_of
from farm.records.rollout import Stage
from farm.records.trajectory import ROLE, ModelCall, Segment, version_range
from farm.row_builders import build_rows
from farm.scheduler.broker import TASKS, enqueue_next
from farm.settings import settings
from farm.store import rollouts, trajectories
from farm.store.placement import StageMessage
from farm.store.rollouts import Claim, RunSummary
from workers.plugins.interfaces import Submission
from workers.plugins.plugin_faults import plugin_call
from workers.process.supervision import note_without_sandbox
from workers.queue.app import app
from workers.queue.claimed_stage import UNCLAIMED, ClaimLost, StageFailed, claimed_stage
from workers.sandboxes.lifecycle import layers
from workers.stages import stage_functions
from workers.stages.stage_functions import RunResult, rewards_of_rows, with_calls

log = logging.getLogger(__name__)

_STAGE_OF = {name: stage for stage, name in TASKS.items()}


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
        places = [places_of(row, calls) for row in rows]
        resend_after_s = stage.worker.options.resend_after_s
        stage.write(partial(_advance_with_rows, stage.claim, resend_after_s, summary, rows, places, others))
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
            layers.discard(submission.layer.name)
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
    places: Sequence[Sequence[ExpertStretch]],
    untrained: Sequence[ModelCall],
    connection: Connection,
) -> bool:
    if not rollouts.advance(connection, claim, resend_after_s, summary):
        return False
    trajectories.mark_untrained(connection, claim.rollout_id, claim.attempt, untrained)
    trajectories.store_segments(connection, claim.rollout_id, claim.batch_id, claim.attempt, rows, places)
    return True
