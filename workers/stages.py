"""The three stages as async functions of plain values: no Celery, no SQL, so that one can be called in a REPL.

`boundary` is the one place that turns whatever goes wrong into an error of the tree in `farm/errors.py`, by the rule of
`workers/plugin_faults.py`; what a plug-in returns is checked by `workers/plugin_values.py` before it leaves a stage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial

from farm.errors import AgentError, EngineError, EvaluatorError, HandlerError, RolloutError, SandboxError
from farm.ids import eval_sandbox_id
from farm.records.request import SamplingParams, SandboxSpec
from farm.records.rollout import Outcome, Stage
from farm.records.trajectory import Message
from farm.seeds import rollout_seed
from workers import plugin_values, registry
from workers.collecting import Collect, collected
from workers.interfaces import (
    AgentContext,
    AgentResult,
    FreshSandbox,
    Keep,
    Policy,
    Record,
    Sandbox,
    SandboxProvider,
    Score,
    Submission,
    Tool,
)
from workers.node_shortage import NodeHealth, healthy_node
from workers.plugin_faults import call_plugin, described, fault_of, is_cancellation
from workers.role_calls import RoleCalls
from workers.roles import NO_MODELS, ChatModel
from workers.run_clock import ended, in_time, limit_s
from workers.sandboxes.diagnosis import broken_from_within
from workers.sandboxes.optional_protocols import shares_layers
from workers.stage_clock import deadline
from workers.stage_job import (
    Problem,
    ResolvedJob,
    SandboxSource,
    StageJob,
    resolve,
    resolve_problem,
    sandbox_source,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of the run stage."""

    outcome: Outcome
    submission: Submission


@asynccontextmanager
async def boundary(
    job: StageJob, what: str, error_type: type[RolloutError], limit_s: float | None = None
) -> AsyncIterator[None]:
    """Let only RolloutErrors out, and cancellations from outside: anything else becomes an `error_type` that names the
    rollout and `what` was done. `limit_s` goes by the clock of the stage.
    """
    try:
        async with deadline(limit_s):
            yield
    except TimeoutError as error:
        limit = f" took longer than {limit_s:g} s" if limit_s is not None else f" timed out: {described(error)}"
        raise error_type(f"{job.rollout_id}: {what}{limit}") from error
    except BaseException as error:
        if is_cancellation(error):
            raise
        fault = fault_of(error, job.rollout_id, what, error_type)
        if fault is error:
            raise
        raise fault from error


async def init(job: StageJob) -> None:
    """Start the sandbox and stage the instance's files in it. It stays for the run stage."""
    async with boundary(job, "starting the sandbox", SandboxError, job.limits.init_s):
        resolved = resolve(job)
        if resolved.source is not None:
            await _start(resolved.problem, resolved.source)


async def _start(problem: Problem, source: SandboxSource) -> None:
    job, provider = problem.job, source.provider
    shared, shares = problem.shared(), shares_layers(provider)
    if shared and shares is not None:
        await shares.start_prepared(job.sandbox_id, source.spec, shared, partial(_prepare, problem))
        return
    sandbox = await provider.start(job.sandbox_id, source.spec)
    try:
        await _prepare(problem, sandbox)
    except BaseException:
        await asyncio.shield(sandbox.stop())
        raise


async def _prepare(problem: Problem, sandbox: Sandbox) -> None:
    async with boundary(problem.job, "preparing the sandbox", HandlerError):
        await problem.handler.prepare(problem.instance, sandbox)


async def run(
    job: StageJob, policy: Policy, record: Record, keep: Keep, models: Mapping[str, ChatModel] = NO_MODELS
) -> RunResult:
    """Let the agent play, then take from the sandbox what is to be scored. The sandbox is gone afterwards.

    The calls of the roles' `models` are kept as an artefact.
    """
    async with AsyncExitStack() as stack:
        async with boundary(job, "joining the sandbox", SandboxError):
            resolved = resolve(job)
            source = resolved.source
            sandbox = None if source is None else await source.provider.attach(job.sandbox_id, source.spec)
        if sandbox is not None:
            stack.push_async_callback(_stop, sandbox)
        ground = await stack.enter_async_context(healthy_node(job.rollout_id, "playing", SandboxError))
        ground.use(sandbox)
        try:
            played = await _play_in(resolved, sandbox, policy, record, keep, models)
        except (SandboxError, HandlerError) as error:
            kernel = "python" in resolved.problem.handler.tools
            if source is None or not await broken_from_within(sandbox, partial(_opened, job, source), kernel=kernel):
                raise
            log.warning("%s: its policy has broken its sandbox: %s", job.rollout_id, error)
            played = RunResult(Outcome.INVALID_ACTION, Submission())
    return played


async def _play_in(
    resolved: ResolvedJob,
    sandbox: Sandbox | None,
    policy: Policy,
    record: Record,
    keep: Keep,
    models: Mapping[str, ChatModel],
) -> RunResult:
    problem, job = resolved.problem, resolved.problem.job
    calls = RoleCalls()
    async with AsyncExitStack() as stack:
        async with boundary(job, f"agent {resolved.agent_name}", AgentError):
            context = AgentContext(
                rollout_id=job.rollout_id,
                messages=_messages(problem),
                tools=_tools(problem, sandbox),
                policy=policy,
                sampling=_seeded(job),
                limits=job.limits,
                record=record,
                keep=keep,
                sandbox=sandbox,
                instance=problem.instance,
                provider=partial(_provider, job),
                models=calls.of(models),
            )
            stack.push_async_callback(_close, context.tools)
            result = await _play(resolved, context)
            if calls.lines:
                await keep(0, calls.artefact())
        submission = await _collect(resolved, sandbox, result.answer)
        rewards = plugin_values.rewards(context.rewards, f"{job.rollout_id}: agent {resolved.agent_name}")
    return RunResult(result.outcome, submission.model_copy(update={"rewards": rewards}))


def _provider(job: StageJob) -> SandboxProvider:
    source = sandbox_source(job, SandboxSpec())
    assert source is not None
    return source.provider


async def _collect(resolved: ResolvedJob, sandbox: Sandbox | None, answer: str | None) -> Submission:
    problem, job = resolved.problem, resolved.problem.job
    async with boundary(job, "collecting the submission", HandlerError):
        collect = Collect(
            lambda where: problem.handler.collect(problem.instance, where, answer),
            partial(_prepared, resolved),
            # or more if the handler says so
            limit_s=max(job.limits.tool_s, getattr(problem.handler, "collect_s", 0.0)),
            start_s=job.limits.init_s,
        )
        submission = await collected(collect, sandbox, answer)
        return plugin_values.submission(submission, f"{job.rollout_id}: the handler's collect()")


@asynccontextmanager
async def _prepared(resolved: ResolvedJob) -> AsyncIterator[Sandbox]:
    """A sandbox as the policy found it."""
    assert resolved.source is not None
    async with _opened(resolved.problem.job, resolved.source) as sandbox:
        await _prepare(resolved.problem, sandbox)
        yield sandbox


def _messages(problem: Problem) -> list[Message]:
    what, rollout_id = "the handler's messages()", problem.job.rollout_id
    result = call_plugin(rollout_id, what, HandlerError, lambda: problem.handler.messages(problem.instance))
    return plugin_values.messages(result, f"{rollout_id}: {what}")


def _tools(problem: Problem, sandbox: Sandbox | None) -> dict[str, Tool]:
    rollout_id = problem.job.rollout_id
    names = call_plugin(rollout_id, "the handler's tools", HandlerError, lambda: list(problem.handler.tools))
    made: dict[str, Tool] = {}
    for name in names:
        made[name] = call_plugin(
            rollout_id, f"tool {name}", AgentError, partial(lambda of: registry.tool(of)(sandbox), name)
        )
    return made


async def _play(resolved: ResolvedJob, context: AgentContext) -> AgentResult:
    """The agent under its deadline, which is an outcome, not an error; unless it waited for engines that are out."""
    limit_s, policy = context.limits.run_s, context.policy

    async def bounded() -> AgentResult:
        # in its own task, as an exit that leaves a task ends the loop's run
        async with boundary(resolved.problem.job, f"agent {resolved.agent_name}", AgentError):
            return await resolved.agent.run(context)

    play = asyncio.ensure_future(bounded())
    try:
        if await in_time(play, limit_s, policy):
            return plugin_values.agent_result(play.result(), context.rollout_id)
        reasons = (policy.blocked, *(model.blocked for model in context.models.values()))
        if blocked := next(filter(None, reasons), ""):
            raise EngineError(f"{context.rollout_id}: its {limit_s:g} s ended while it waited: {blocked}")
        return AgentResult(Outcome.DEADLINE)
    finally:
        await ended(play, context.rollout_id)


def _seeded(job: StageJob) -> SamplingParams:
    """The batch's sampling, with a seed of this rollout's own."""
    if job.sampling.seed is None:
        return job.sampling
    seed = rollout_seed(job.sampling.seed, job.data_source, job.fields, job.group_index, job.sample_index)
    return job.sampling.model_copy(update={"seed": seed})


async def evaluate(
    job: StageJob, submission: Submission, models: Mapping[str, ChatModel] = NO_MODELS
) -> tuple[Score, str]:
    """Score a submission: the score, and the evaluator's name."""
    async with boundary(job, "scoring", EvaluatorError, limit_s(Stage.EVAL, job.limits)):
        problem = resolve_problem(job)
        evaluator = problem.evaluator(models)
        async with healthy_node(job.rollout_id, "scoring", EvaluatorError) as ground:
            score = await evaluator.evaluate(submission, _fresh(problem, ground), job.limits.eval_s)
        name = plugin_values.name(evaluator.name, f"{job.rollout_id}: the evaluator's name")
        return plugin_values.score(score, f"{job.rollout_id}: evaluator {name}"), name


def _fresh(problem: Problem, ground: NodeHealth) -> FreshSandbox:
    """Opens a sandbox that the policy never touched; one at a time."""
    job = problem.job
    # not before the first is opened: most evaluators need none
    resolve_source = cache(lambda: sandbox_source(job, problem.spec()))

    @asynccontextmanager
    async def fresh() -> AsyncIterator[Sandbox]:
        source = resolve_source()
        if source is None:
            raise EvaluatorError(f"{job.rollout_id}: handler {job.data_source} scores in a sandbox but asks for none")
        async with _opened(job, source) as sandbox, ground.using(sandbox):
            yield sandbox

    return fresh


@asynccontextmanager
async def _opened(job: StageJob, source: SandboxSource) -> AsyncIterator[Sandbox]:
    """Yield a sandbox of its own beside the one that is played in."""
    name = eval_sandbox_id(job.sandbox_id)
    async with boundary(job, f"starting the sandbox {name}", SandboxError, job.limits.init_s):
        sandbox = await source.provider.start(name, source.spec)
    try:
        yield sandbox
    finally:
        await _stop(sandbox)


async def discard(job: StageJob) -> None:
    """Stop the sandbox of a rollout that was taken away between two stages."""
    source = resolve(job).source
    if source is not None:
        try:
            sandbox = await source.provider.attach(job.sandbox_id, source.spec)
        except SandboxError:
            return
        await _stop(sandbox)


async def _stop(sandbox: Sandbox) -> None:
    """Stop a sandbox even while being cancelled; what cannot be stopped is left to the node's sweep."""
    try:
        await asyncio.shield(sandbox.stop())
    except BaseException as error:
        if is_cancellation(error):
            raise
        log.warning("sandbox %s did not stop: %s", sandbox.sandbox_id, described(error))


async def _close(tools: Mapping[str, Tool]) -> None:
    for name, tool in tools.items():
        try:
            await tool.close()
        except BaseException as error:
            if is_cancellation(error):
                raise
            log.warning("tool %s did not close: %s", name, described(error))
