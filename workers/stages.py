"""The three stages as async functions of plain values: no Celery, no SQL, so that one can be called in a REPL.

`boundary` is the one place that turns whatever goes wrong into an error of the tree in `farm/errors.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from farm.errors import AgentError, EngineError, EvaluatorError, FarmError, HandlerError, RolloutError, SandboxError
from farm.request import Limits, SamplingParams, SandboxSpec
from farm.rollout import POLICY_OUTCOMES, Outcome, Stage
from workers import registry
from workers.interfaces import (
    Agent,
    AgentContext,
    AgentResult,
    Handler,
    Keep,
    Policy,
    Record,
    Sandbox,
    SandboxProvider,
    Score,
    Submission,
    Tool,
)
from workers.policy.rollout import Rules
from workers.sandboxes.content import digest
from workers.sandboxes.provider import JoinedProvider

log = logging.getLogger(__name__)

T = TypeVar("T")

_GRACE_S = 30.0
"""What an evaluator gets beyond its limit before it counts as broken, to report the limit itself."""

_LEAST_WAIT_S = 0.05
_LONGEST_WAIT_S = 2.0
_LATE_S = 1.0
"""More than so late, the process was frozen, or somebody blocked its loop: that is not the policy's time."""
_PATIENCE_S = 30.0
"""What an agent gets to clean up after itself, before it is cancelled once more."""


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout to play: what the stages need to know of it."""

    rollout_id: str
    attempt: int
    sample_index: int
    data_source: str
    fields: Mapping[str, Any]
    sampling: SamplingParams
    limits: Limits
    sandbox_kind: str
    model: str
    n_samples: int = 1
    agent: str = ""
    """Who plays it; empty is the handler's own choice."""
    group_id: str = ""
    rules: Rules = field(default_factory=Rules)

    @property
    def sandbox_id(self) -> str:
        return sandbox_id(self.rollout_id, self.attempt)


def limit_s(stage: Stage, limits: Limits) -> float:
    """The time after which a stage ends by itself, if all that it waits for heeds its own limits."""
    if stage is Stage.INIT:
        return limits.init_s
    if stage is Stage.RUN:
        return limits.run_s + limits.tool_s
    return limits.init_s + limits.eval_s + _GRACE_S


def sandbox_id(rollout_id: str, attempt: int) -> str:
    """Carries the attempt, so that a late worker never touches its successor's sandbox."""
    return f"{rollout_id}.{attempt}"


def fresh_id(policys: str) -> str:
    """The id of the sandbox that is scored in, from that of the policy's."""
    return f"{policys}.eval"


@dataclass(frozen=True, slots=True)
class Played:
    """What the run stage found out."""

    outcome: Outcome
    submission: Submission


@asynccontextmanager
async def boundary(
    job: Job, what: str, error_type: type[RolloutError], limit_s: float | None = None
) -> AsyncIterator[None]:
    """Let only RolloutErrors out: anything else becomes an `error_type` that names the rollout and `what` was done."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except RolloutError:
        raise
    except TimeoutError as error:
        limit = f" took longer than {limit_s:g} s" if limit_s is not None else f" timed out: {error}"
        raise error_type(f"{job.rollout_id}: {what}{limit}") from error
    except FarmError as error:
        raise error_type(f"{job.rollout_id}: {what}: {error}") from error
    except Exception as error:
        log.exception("%s: %s broke", job.rollout_id, what)
        raise error_type(f"{job.rollout_id}: {what} broke: {type(error).__name__}: {error}") from error


def _handler(job: Job) -> tuple[Handler, BaseModel]:
    """The handler and its checked instance."""
    try:
        handler = registry.handler(job.data_source)
        return handler, handler.instance_type.model_validate(dict(job.fields))
    except (FarmError, ValidationError) as error:
        raise HandlerError(f"{job.rollout_id}: {error}", retryable=False) from error


def _agent(job: Job, handler: Handler) -> Agent:
    return registry.agent(job.agent or handler.agent)


def _played_in(job: Job, handler: Handler, instance: BaseModel) -> tuple[SandboxProvider, SandboxSpec] | None:
    """Where it is played: in what the instance needs, and what the agent needs there."""
    return _where(job, needed_by(_agent(job, handler), _spec(job, handler, instance)))


def _spec(job: Job, handler: Handler, instance: BaseModel) -> SandboxSpec | None:
    return _asked(job, "the handler's sandbox()", lambda: handler.sandbox(instance))


def _asked(job: Job, what: str, ask: Callable[[], T]) -> T:
    """What a handler answers. HandlerError if it breaks, whatever stage asked it."""
    try:
        return ask()
    except RolloutError:
        raise
    except Exception as error:
        log.exception("%s: %s broke", job.rollout_id, what)
        raise HandlerError(f"{job.rollout_id}: {what} broke: {type(error).__name__}: {error}") from error


def needed_by(agent: Agent, spec: SandboxSpec | None) -> SandboxSpec | None:
    """What an agent is played in, given what the instance needs, if anything."""
    needs = getattr(agent, "sandbox", None)
    return needs(spec) if needs is not None else spec


def _where(job: Job, spec: SandboxSpec | None) -> tuple[SandboxProvider, SandboxSpec] | None:
    """The instance's own choice of sandbox, else the batch's, else the best there is."""
    if spec is None:
        return None
    kind = spec.kind if spec.kind != "auto" else job.sandbox_kind
    return registry.sandbox(kind if kind != "auto" else registry.best_sandbox()), spec


def _shared(job: Job, handler: Handler) -> str:
    """A name for what is prepared once for all samples of the instance; empty if each is prepared by itself."""
    once = job.n_samples > 1 and getattr(handler, "prepares_once", False)
    return digest(job.data_source, dict(job.fields)) if once else ""


@dataclass(frozen=True, slots=True)
class Place:
    """What a rollout is played in; `shared` names what is prepared once for all siblings, empty if nothing is."""

    provider: JoinedProvider
    spec: SandboxSpec
    shared: str


def place_of(job: Job) -> Place | None:
    """What sandbox a rollout will need, if it is of a kind that can be had from stock. RolloutError."""
    handler, instance = _handler(job)
    place = _played_in(job, handler, instance)
    if place is None or not isinstance(place[0], JoinedProvider):
        return None
    return Place(place[0], place[1], _shared(job, handler))


async def init(job: Job) -> None:
    """Start the sandbox and stage the instance's files in it. It stays for the run stage."""
    async with boundary(job, "starting the sandbox", SandboxError, job.limits.init_s):
        handler, instance = _handler(job)
        place = _played_in(job, handler, instance)
        if place is None:
            return
        provider, spec = place
        shared = _shared(job, handler)
        if shared and isinstance(provider, JoinedProvider):
            await provider.start_prepared(job.sandbox_id, spec, shared, partial(_prepare, job, handler, instance))
            return
        sandbox = await provider.start(job.sandbox_id, spec)
        try:
            await _prepare(job, handler, instance, sandbox)
        except BaseException:
            await asyncio.shield(sandbox.stop())
            raise


async def _prepare(job: Job, handler: Handler, instance: BaseModel, sandbox: Sandbox) -> None:
    async with boundary(job, "preparing the sandbox", HandlerError):
        await handler.prepare(instance, sandbox)


async def run(job: Job, policy: Policy, record: Record, keep: Keep) -> Played:
    """Let the agent play, then take from the sandbox what is to be scored. The sandbox is gone afterwards."""
    async with AsyncExitStack() as stack:
        async with boundary(job, "joining the sandbox", SandboxError):
            handler, instance = _handler(job)
            place = _played_in(job, handler, instance)
            sandbox = None if place is None else await place[0].attach(job.sandbox_id, place[1])
        if sandbox is not None:
            stack.push_async_callback(_stop, sandbox)
        async with boundary(job, f"agent {job.agent or handler.agent}", AgentError):
            context = AgentContext(
                rollout_id=job.rollout_id,
                messages=_asked(job, "the handler's messages()", lambda: handler.messages(instance)),
                tools={name: registry.tool(name)(sandbox) for name in handler.tools},
                policy=policy,
                sampling=_seeded(job),
                limits=job.limits,
                record=record,
                keep=keep,
                sandbox=sandbox,
            )
            stack.push_async_callback(_close, context.tools)
            result = await _play(_agent(job, handler), context)
        async with boundary(job, "collecting the submission", HandlerError, job.limits.tool_s):
            submission = await handler.collect(instance, sandbox, result.answer)
    return Played(result.outcome, submission)


async def _play(agent: Agent, context: AgentContext) -> AgentResult:
    """The agent under its deadline, which is an outcome, not an error; unless it waited for engines that are out."""
    limit_s, policy = context.limits.run_s, context.policy
    play = asyncio.ensure_future(agent.run(context))
    try:
        if await _in_time(play, limit_s, policy):
            return _by_the_policy(play.result(), context.rollout_id)
        if policy.blocked:
            raise EngineError(f"{context.rollout_id}: its {limit_s:g} s ended while it waited: {policy.blocked}")
        return AgentResult(Outcome.DEADLINE)
    finally:
        await ended(play, context.rollout_id)


def _by_the_policy(result: AgentResult, rollout_id: str) -> AgentResult:
    """What an agent says, if that is for an agent to say: what we broke is an error, and never scored."""
    if result.outcome not in POLICY_OUTCOMES:
        raise AgentError(f"{rollout_id}: its agent ended with {result.outcome!r}, which no policy can bring about")
    return result


async def ended(play: asyncio.Future[Any], rollout_id: str, patience_s: float = _PATIENCE_S) -> None:
    """Cancel it until it has ended, as an agent may swallow a cancellation. What it raises then goes no further."""
    while not play.done():
        play.cancel()
        done, _ = await asyncio.wait([play], timeout=patience_s)
        if not done:
            log.warning("%s: its agent has not ended %g s after it was cancelled", rollout_id, patience_s)
    if not play.cancelled() and play.exception() is not None:
        log.debug("%s: its agent ended with %r", rollout_id, play.exception())


async def _in_time(play: asyncio.Future[AgentResult], limit_s: float, policy: Policy) -> bool:
    """Whether it ended within the limit; time in which engines were paused for new weights is on nobody's clock.

    Nor is time in which nothing in this process could go on.
    """
    deadline = time.monotonic() + limit_s - policy.paused_s
    while not play.done():
        now = time.monotonic()
        left_s = deadline + policy.paused_s - now
        if left_s <= 0:
            return False
        wait_s = min(max(left_s, _LEAST_WAIT_S), _LONGEST_WAIT_S)
        await asyncio.wait([play], timeout=wait_s)
        late_s = time.monotonic() - now - wait_s
        deadline += late_s if late_s > _LATE_S else 0.0
    return True


def _seeded(job: Job) -> SamplingParams:
    """The batch's sampling, with a seed of this sample's own."""
    if job.sampling.seed is None:
        return job.sampling
    return job.sampling.model_copy(update={"seed": job.sampling.seed + job.sample_index})


async def evaluate(job: Job, submission: Submission) -> tuple[Score, str]:
    """Score a submission: the score, and the evaluator's name."""
    limit_s = job.limits.eval_s
    async with boundary(job, "scoring", EvaluatorError, limit_s + job.limits.init_s + _GRACE_S):
        handler, instance = _handler(job)
        evaluator = handler.evaluator(instance)
        score = await evaluator.evaluate(submission, _fresh(job, handler, instance), limit_s)
        if not isinstance(score.value, Real) or not math.isfinite(score.value):
            raise EvaluatorError(f"{job.rollout_id}: {evaluator.name} gave {score.value!r} as the reward")
        # some numbers of other libraries are none for a database
        return Score(float(score.value), score.details), evaluator.name


def _fresh(job: Job, handler: Handler, instance: BaseModel) -> Callable[[], Any]:
    """Opens a sandbox that the policy never touched; one at a time."""

    @asynccontextmanager
    async def fresh() -> AsyncIterator[Sandbox]:
        place = _where(job, _spec(job, handler, instance))
        if place is None:
            raise EvaluatorError(f"{job.rollout_id}: handler {job.data_source} scores in a sandbox but asks for none")
        async with boundary(job, "starting the sandbox to score in", SandboxError, job.limits.init_s):
            sandbox = await place[0].start(fresh_id(job.sandbox_id), place[1])
        try:
            yield sandbox
        finally:
            await _stop(sandbox)

    return fresh


async def discard(job: Job) -> None:
    """Stop the sandbox of a rollout that was taken away between two stages."""
    handler, instance = _handler(job)
    place = _played_in(job, handler, instance)
    if place is not None:
        try:
            sandbox = await place[0].attach(job.sandbox_id, place[1])
        except SandboxError:
            return
        await _stop(sandbox)


async def _stop(sandbox: Sandbox) -> None:
    """Stop a sandbox even while being cancelled; what cannot be stopped is left to the node's sweep."""
    try:
        await asyncio.shield(sandbox.stop())
    except Exception as error:
        log.warning("sandbox %s did not stop: %s", sandbox.sandbox_id, error)


async def _close(tools: Mapping[str, Tool]) -> None:
    for name, tool in tools.items():
        try:
            await tool.close()
        except Exception as error:
            log.warning("tool %s did not close: %s", name, error)
