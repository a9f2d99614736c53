"""The three Celery tasks of a rollout: claim the stage, play it, write what came of it.

A ring is only a hint. A task that gets no claim cuts the chain and ends; a stage that fails cuts the chain after it has
written why. Whatever happens, the row ends up advanced, finished or queued again, or its lease runs out.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from celery import Task

from farm.errors import AgentError, RolloutError
from farm.queue import TASKS
from farm.rollout import Failure, Stage
from farm.store import rollouts, trajectories
from farm.store.rollouts import Claim
from farm.trajectory import segments
from workers import stages
from workers.app import app
from workers.interfaces import Score, Submission
from workers.stages import Job, Played
from workers.worker import Recorder, Worker, worker

log = logging.getLogger(__name__)

T = TypeVar("T")


@app.task(name=TASKS[Stage.INIT], bind=True)  # type: ignore[untyped-decorator]
def init_sandbox(self: Task, rollout_id: str, attempt: int) -> None:
    """Start the rollout's sandbox."""

    def write(claim: Claim, job: Job, result: None) -> bool:
        me = worker()
        written = me.store.write(partial(rollouts.advance, held=claim, ring_again_s=me.options.ring_again_s))
        if not written:
            me.loop.run(stages.discard(job), lambda cancel: None)
        return written

    _stage(self, Stage.INIT, rollout_id, attempt, lambda claim, job: stages.init(job), write)


@app.task(name=TASKS[Stage.RUN], bind=True)  # type: ignore[untyped-decorator]
def run_agent(self: Task, rollout_id: str, attempt: int) -> None:
    """Let the policy play."""
    me = worker()
    recorders: list[Recorder] = []

    def play(claim: Claim, job: Job) -> Coroutine[Any, Any, Played]:
        recorders.append(me.recorder(claim))
        return stages.run(job, me.policy(job), recorders[0].record, recorders[0].keep)

    def write(claim: Claim, job: Job, played: Played) -> bool:
        return me.store.write(partial(_advance_played, claim=claim, played=played, recorder=recorders[0], me=me))

    _stage(self, Stage.RUN, rollout_id, attempt, play, write)


@app.task(name=TASKS[Stage.EVAL], bind=True)  # type: ignore[untyped-decorator]
def evaluate(self: Task, rollout_id: str, attempt: int) -> None:
    """Score what was submitted."""
    me = worker()

    def play(claim: Claim, job: Job) -> Coroutine[Any, Any, tuple[Score, str]]:
        return stages.evaluate(job, Submission.model_validate(claim.submission or {}))

    def write(claim: Claim, job: Job, scored: tuple[Score, str]) -> bool:
        score, name = scored
        written = me.store.write(
            partial(rollouts.finish, held=claim, value=score.value, details=score.details, evaluator=name)
        )
        me.signals.ended(claim.batch_id)
        return written

    _stage(self, Stage.EVAL, rollout_id, attempt, play, write)


def _stage(
    task: Task,
    stage: Stage,
    rollout_id: str,
    attempt: int,
    play: Callable[[Claim, Job], Coroutine[Any, Any, T]],
    write: Callable[[Claim, Job, T], bool],
) -> None:
    """Claim, play, write. The chain goes on only if the next stage is queued."""
    me = worker()
    rest, task.request.chain = task.request.chain, None
    claim = me.claim(rollout_id, attempt, stage)
    if claim is None:
        return
    with me.leases.hold(claim) as held:
        job, max_attempts = me.job(claim)
        try:
            result = me.loop.run(play(claim, job), held.working)
        except asyncio.CancelledError:
            _hand_back(me, claim, held.reason)
        except Exception as error:
            _fail(me, claim, _as_rollout_error(error, rollout_id), max_attempts)
        else:
            if write(claim, job, result):
                task.request.chain = rest


def _advance_played(connection: Any, claim: Claim, played: Played, recorder: Recorder, me: Worker) -> bool:
    calls = [recorder.calls[index] for index in sorted(recorder.calls)]
    found = {
        "policy_outcome": played.outcome.value,
        "submission": played.submission.model_dump(mode="json"),
        "n_turns": len(calls),
        "n_response_tokens": sum(call.n_response_tokens for call in calls),
    }
    if not rollouts.advance(connection, claim, me.options.ring_again_s, found):
        return False
    trajectories.store_segments(connection, claim.rollout_id, claim.batch_id, claim.attempt, segments(calls))
    return True


def _hand_back(me: Worker, claim: Claim, reason: str) -> None:
    """A drained node's work goes to another, and that is no failed attempt. Cancelled or lost work is not ours."""
    if reason == "drained":
        failure = Failure("drained", f"{claim.rollout_id}: node {claim.node} was drained in stage {claim.stage}")
        me.store.write(lambda connection: rollouts.requeue(connection, claim, failure, {}))
        me.signals.wake()


def _fail(me: Worker, claim: Claim, error: RolloutError, max_attempts: int) -> None:
    n_failures = claim.n_failures + 1
    again = error.retryable and n_failures < max_attempts
    retry_in_s = min(60.0, me.options.retry_s * 2 ** (n_failures - 1)) if again else None
    log.warning("%s (attempt %d, %s)", error, claim.attempt, "will be tried again" if again else "given up")
    failure = Failure(error.kind, str(error))
    me.store.write(lambda connection: rollouts.fail(connection, claim, failure, retry_in_s))
    me.signals.ended(claim.batch_id)


def _as_rollout_error(error: Exception, rollout_id: str) -> RolloutError:
    """What the stages let out is classified; the rest is a fault of the farm itself."""
    if isinstance(error, RolloutError):
        return error
    log.error("%s: the farm itself broke\n%s", rollout_id, traceback.format_exc())
    return AgentError(f"{rollout_id}: the farm itself broke: {type(error).__name__}: {error}")
