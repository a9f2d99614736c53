"""The three Celery tasks of a rollout: claim the stage, play it, write what came of it.

A ring is only a hint. A task that gets no claim cuts the chain and ends; a stage that fails cuts the chain after it has
written why. Whatever happens, the row ends up advanced, finished or queued again, or its lease runs out.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from celery import Task
from sqlalchemy import Connection

from farm.errors import AgentError, RolloutError
from farm.exactness import check
from farm.queue import TASKS
from farm.rollout import Failure, Stage, group_id
from farm.store import failures, nodes, placement, rollouts, trajectories
from farm.store.failures import Patience
from farm.store.rollouts import Claim
from farm.trajectory import ModelCall, Segment, segments, version_range
from farm.verdict import DRAINED, Budget, Verdict, overdue, verdict, verdict_on
from workers import stages
from workers.app import app
from workers.interfaces import Score, Submission
from workers.stages import Job, Played
from workers.worker import Recorder, Worker, worker

log = logging.getLogger(__name__)

T = TypeVar("T")

_DISCARD_S = 60.0


class StageTask(Task):  # type: ignore[misc]
    """A stage; its chain goes on by a ring for the next one, and a broker that is away is no fault of this one."""

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        try:
            return super().apply_async(args, kwargs, **options)
        except Exception as error:  # the transports raise anything from OSError to their own
            log.warning("the broker does not answer (%s); %s%s will be rung again", error, self.name, args)
            return None


@app.task(name=TASKS[Stage.INIT], bind=True, base=StageTask)  # type: ignore[untyped-decorator]
def init_sandbox(self: Task, rollout_id: str, attempt: int) -> None:
    """Start the rollout's sandbox."""

    def write(claim: Claim, job: Job, result: None) -> bool:
        me = worker()
        written = me.store.write(partial(rollouts.advance, held=claim, ring_again_s=me.options.ring_again_s))
        if not written:
            with suppress(TimeoutError):
                # the node's sweep removes it otherwise
                me.loop.run(stages.discard(job), within_s=_DISCARD_S)
        return written

    _stage(self, Stage.INIT, rollout_id, attempt, lambda claim, job: stages.init(job), write)


@app.task(name=TASKS[Stage.RUN], bind=True, base=StageTask)  # type: ignore[untyped-decorator]
def run_agent(self: Task, rollout_id: str, attempt: int) -> None:
    """Let the policy play."""
    me = worker()
    recorders: list[Recorder] = []

    def play(claim: Claim, job: Job) -> Coroutine[Any, Any, Played]:
        recorders.append(me.recorder(claim))
        policy = me.policy(job)
        me.leases.held(claim).excused_s = lambda: policy.paused_s
        return stages.run(job, policy, recorders[0].record, recorders[0].keep)

    def write(claim: Claim, job: Job, played: Played) -> bool:
        calls = [recorders[0].calls[index] for index in sorted(recorders[0].calls)]
        rows = segments(calls)
        check(rows, calls)
        return me.store.write(partial(_advance_played, claim=claim, played=played, calls=calls, rows=rows, me=me))

    _stage(self, Stage.RUN, rollout_id, attempt, play, write)


@app.task(name=TASKS[Stage.EVAL], bind=True, base=StageTask)  # type: ignore[untyped-decorator]
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
        try:
            job = me.job(claim)
            held.limit_s = stages.limit_s(stage, job.limits) + me.options.overdue_s
            result = me.loop.run(play(claim, job), held.working)
            # what was played may not be fit to be kept: training on it would be worse than losing it
            if write(claim, job, result):
                task.request.chain = rest
                _went_well(me, claim)
        except asyncio.CancelledError:
            _hand_back(me, claim, held.reason)
        except Exception as error:
            if held.reason:
                # what breaks because it is stopped has not failed
                log.info("%s: stage %s, stopped (%s), ended with %r", rollout_id, stage, held.reason, error)
                _hand_back(me, claim, held.reason)
            else:
                _fail(me, claim, _as_rollout_error(error, rollout_id))


def _advance_played(
    connection: Any, claim: Claim, played: Played, calls: Sequence[ModelCall], rows: Sequence[Segment], me: Worker
) -> bool:
    oldest, newest = version_range(calls)
    found = {
        "policy_outcome": played.outcome.value,
        "submission": played.submission.model_dump(mode="json"),
        "n_turns": len(calls),
        "n_response_tokens": sum(call.n_response_tokens for call in calls),
        "n_invalid_actions": sum(call.n_invalid for call in calls),
        "n_mismatches": sum(call.mismatch is not None for call in calls),
        "n_segments": len(rows),
        "version_min": oldest,
        "version_max": newest,
    }
    if not rollouts.advance(connection, claim, me.options.ring_again_s, found):
        return False
    trajectories.store_segments(connection, claim.rollout_id, claim.batch_id, claim.attempt, rows)
    return True


def _hand_back(me: Worker, claim: Claim, reason: str) -> None:
    """What was stopped from outside: a drained node's work goes to another. Cancelled or lost work is not ours."""
    stage = f"{claim.rollout_id}: stage {claim.stage}"
    if reason == "stalled":
        failure = Failure(DRAINED, f"{stage} was handed back, as its worker hangs and ends")
        _end_attempt(me, claim, failure, verdict(DRAINED))
    elif reason == "drained":
        failure = Failure(DRAINED, f"{stage} was handed back, as node {claim.node} was drained")
        _end_attempt(me, claim, failure, verdict(DRAINED))
    elif reason == "overdue":
        _fail(me, claim, overdue(claim.stage, f"{stage} went on beyond its deadline and was stopped"))
    elif not reason:
        _fail(me, claim, AgentError(f"{stage} was cancelled from within"))


def _fail(me: Worker, claim: Claim, error: RolloutError) -> None:
    found = verdict_on(error)
    if _end_attempt(me, claim, Failure(error.kind, str(error)), found) and found.of_node:
        _complain(me, claim, str(error))


def _end_attempt(me: Worker, claim: Claim, failure: Failure, found: Verdict) -> bool:
    """Close the attempt as its cause asks, and tell those who wait for what follows. False if the claim is gone."""
    patience = Patience(me.options.retry_s, me.options.node_timeout_s)
    ending = me.store.write(
        partial(failures.end_attempt, held=claim, failure=failure, verdict=found, patience=patience)
    )
    if ending is None:
        return False
    level = logging.INFO if found.budget in {Budget.FREE, Budget.RESTARTS} else logging.WARNING
    log.log(level, "%s (attempt %d, %s)", ending.failure.message, claim.attempt, ending.in_words)
    if ending.again_in_s is None:
        me.signals.ended(claim.batch_id)
    else:
        me.signals.wake()
    return True


def _went_well(me: Worker, claim: Claim) -> None:
    doubted = me.breaker.went_well(group_id(claim.batch_id, claim.group_index))
    if not doubted:
        return
    cleared, left = me.store.write(partial(_clear, node=me.node, doubted=doubted))
    me.breaker.learn(doubted, left)
    if cleared:
        log.warning("node %s plays again, and takes as much as before", me.node)
        me.signals.wake()


def _clear(connection: Connection, node: str, doubted: str) -> tuple[bool, str]:
    """Whether that took the doubt off the node, and what doubt is left."""
    return nodes.clear(connection, node, doubted), nodes.doubted(connection, node)


def _complain(me: Worker, claim: Claim, message: str) -> None:
    """Count a failure that may be the node's, and take the node out if there are too many."""
    why = me.breaker.failed(group_id(claim.batch_id, claim.group_index), message)
    if not why:
        return
    out_s = me.store.write(partial(_trip, me=me, why=why))
    if out_s is None:
        log.warning("node %s should be taken out (%s), and goes on, as no other node is up and well", me.node, why)
    elif out_s:
        me.breaker.tripped(why)
        log.warning("node %s takes nothing for %.0f s: %s", me.node, out_s, why)
        me.signals.wake()


def _trip(connection: Connection, me: Worker, why: str) -> float | None:
    """Take the node out, and what it has not begun off it."""
    out_s = nodes.trip(connection, me.node, why, me.options.node_timeout_s)
    if out_s:
        placement.hand_back_unbegun(connection, me.node)
    return out_s


def _as_rollout_error(error: Exception, rollout_id: str) -> RolloutError:
    """What the stages let out is classified; the rest is a fault of the farm itself."""
    if isinstance(error, RolloutError):
        return error
    log.error("%s: the farm itself broke\n%s", rollout_id, traceback.format_exc())
    return AgentError(f"{rollout_id}: the farm itself broke: {type(error).__name__}: {error}")
