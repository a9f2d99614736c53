"""The three stages as async functions of plain values, without Celery or SQL: they can be called in a REPL.

The return values of plug-ins are validated by `workers/plugins/plugin_values.py` before they leave a stage. Calls of
roles' LLMs are kept as one artefact, separate from the policy's calls.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from farm.errors import AgentError, EngineError, EvaluatorError, HandlerError, SandboxError
from farm.plugins import follows
from farm.records.request import SamplingParams, SandboxSpec
from farm.records.rollout import Outcome, Stage
from farm.records.submission import EarlyScore, RowRewards, row_rewards, submitted_calls
from farm.records.trajectory import Completion, Message, ModelCall, Segment
from farm.row_builders import chosen_calls
from farm.seeds import rollout_seed
from workers.evaluators.answer import verified
from workers.plugins import plugin_values, registry
from workers.plugins.handler import NothingLeft, RunningEvaluator
from workers.plugins.interfaces import (
    NO_MODELS,
    AgentContext,
    AgentResult,
    Artefact,
    ChatModel,
    Evaluator,
    Keep,
    Policy,
    Record,
    Sandbox,
    SandboxProvider,
    Score,
    Submission,
    Tool,
)
from workers.plugins.plugin_faults import described, is_cancellation, plugin_call
from workers.sandboxes.diagnosis import broken_from_within
from workers.sandboxes.optional_protocols import shares_layers
from workers.stage_clock import off_clock
from workers.stages.fresh_sandboxes import (
    fresh_sandboxes,
    opened,
    restored_files,
    services_of,
    stop_sandbox,
    with_copied_layer,
)
from workers.stages.handler_calls import Collect, TaskSteps, collected
from workers.stages.left_layer import LayerStore, NoLayerStore, keep_layer
from workers.stages.node_shortage import NodeHealth, healthy_node
from workers.stages.redaction import Redactor
from workers.stages.run_clock import ended, in_time, limit_s
from workers.stages.stage_job import Problem, ResolvedJob, SandboxSource, StageJob, boundary, resolve, sandbox_source

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunResult:
    outcome: Outcome
    submission: Submission


async def init(problem: Problem) -> bool:
    """Start the sandbox and prepare the instance's files in it; it stays up for the run stage.

    Return whether there is a sandbox.
    """
    job = problem.job
    async with boundary(job, "starting the sandbox", SandboxError, job.limits.init_s):
        resolved = resolve(problem)
        if resolved.source is not None:
            await _start(problem, resolved.source)
    return resolved.source is not None


async def _start(problem: Problem, source: SandboxSource) -> None:
    job, provider = problem.job, source.provider
    shared, shares = problem.shared(), shares_layers(provider)
    if shared and shares is not None:
        await shares.start_prepared(job.sandbox_id, source.spec, shared, partial(_prepare, problem))
        return
    sandbox = await provider.start(job.sandbox_id, source.spec)
    try:
        await _prepare(problem, sandbox)
        if "init" in source.spec.network_in and "run" not in source.spec.network_in:
            # Processes started with the network would keep it.
            await sandbox.exec(["bash", "-c", "kill -9 -1"], timeout_s=job.limits.tool_s)
    except BaseException:
        await asyncio.shield(sandbox.stop())
        raise


async def _prepare(problem: Problem, sandbox: Sandbox) -> None:
    async with boundary(problem.job, "preparing the sandbox", HandlerError):
        await problem.handler.prepare(sandbox)


async def run(
    problem: Problem,
    policy: Policy,
    record: Record,
    keep: Keep,
    layer_store: LayerStore | None = None,
    models: Mapping[str, ChatModel] = NO_MODELS,
) -> RunResult:
    """Run the agent, then collect the submission from the sandbox. The sandbox is stopped afterwards.

    The calls of the roles' `models` are kept as an artefact.
    """
    job = problem.job
    async with AsyncExitStack() as stack:
        async with boundary(job, "joining the sandbox", SandboxError):
            resolved = resolve(problem)
            source = resolved.source
            sandbox = None if source is None else await source.provider.attach(job.sandbox_id, source.spec)
        if sandbox is not None:
            stack.push_async_callback(stop_sandbox, sandbox)
        async with healthy_node(job.config.sandboxes, job.rollout_id, "the run", SandboxError) as node_health:
            node_health.use_policy_sandbox(sandbox)
            try:
                run_result = await _run_in(resolved, sandbox, node_health, policy, record, keep, models)
            except (SandboxError, HandlerError) as error:
                kernel = "python" in problem.handler.tools
                another = None if source is None else partial(opened, job, source)
                if another is None or not await broken_from_within(sandbox, another, kernel=kernel):
                    raise
                log.warning("Rollout %s: policy broke its sandbox: %s", job.rollout_id, error)
                return RunResult(Outcome.INVALID_ACTION, Submission())
        is_kept = problem.handler.keeps_layer and run_result.submission.early_score is None
        if source is not None and sandbox is not None and is_kept:
            async with boundary(job, "keeping what the policy left", SandboxError):
                restored = restored_files(problem)
                layer = await keep_layer(job, source, sandbox, layer_store or NoLayerStore(), restored)
                submission = run_result.submission.model_copy(update={"layer": layer})
                run_result = replace(run_result, submission=submission)
    return run_result


async def _run_in(
    resolved: ResolvedJob,
    sandbox: Sandbox | None,
    node_health: NodeHealth,
    policy: Policy,
    record: Record,
    keep: Keep,
    models: Mapping[str, ChatModel],
) -> RunResult:
    problem, job = resolved.problem, resolved.problem.job
    redactor, calls = Redactor(job.batch.secrets.values()), RoleCalls()
    steps = TaskSteps(problem, sandbox, fresh_sandboxes(problem, node_health, Submission(), policy_sandbox=sandbox))
    async with AsyncExitStack() as stack:
        async with boundary(job, f"agent {resolved.agent_name}", AgentError):
            context = AgentContext(
                rollout_id=job.rollout_id,
                messages=_messages(problem),
                tools={name: redactor.tool(tool) for name, tool in _tools(problem, sandbox).items()},
                policy=policy,
                sampling=_seeded(job),
                limits=job.limits,
                record=redactor.record(record),
                keep=redactor.keep(keep),
                sandbox=sandbox,
                next_messages=steps.next_messages,
                instance=problem.handler.instance,
                provider=partial(_provider, job),
                models=calls.of(models),
                agent_requests=job.batch.agent_requests,
                verify=partial(_verify, job),
            )
            stack.push_async_callback(_close, context.tools)
            result = await _run_agent(resolved, context)
            await steps.finish(result, resolved.agent_name)
            if calls.lines:
                await context.keep(0, calls.artefact())
        submission = redactor.submission(await _collect(resolved, sandbox, result.answer))
        rewards = plugin_values.rewards(context.rewards, f"{job.rollout_id}: agent {resolved.agent_name}")
        submission = submission.model_copy(update={"rewards": rewards, "steps": redactor.json(steps.records)})
        served = await services_of(problem, sandbox)
        if sandbox is not None and (served or problem.handler.scores_running):
            early = await _score_running(problem, sandbox, submission, models, served)
            submission = submission.model_copy(update={"early_score": early})
    return RunResult(result.outcome, submission)


async def _verify(
    job: StageJob, family: str, entry: Mapping[str, Any], settings: Mapping[str, Any], answer: str
) -> float:
    with off_clock(job.limits.eval_s):
        return await verified(family, entry, settings, answer, job.limits.eval_s)


def _provider(job: StageJob) -> SandboxProvider:
    source = sandbox_source(job, SandboxSpec(), Stage.RUN)
    assert source is not None
    return source.provider


async def _collect(resolved: ResolvedJob, sandbox: Sandbox | None, answer: str | None) -> Submission:
    problem, job = resolved.problem, resolved.problem.job
    async with boundary(job, "collecting the submission", HandlerError):
        collect = Collect(
            lambda where: problem.handler.collect(where, answer),
            partial(_prepared, resolved),
            limit_s=max(job.limits.tool_s, problem.handler.collect_s),
            start_s=job.limits.init_s,
        )
        submission = await collected(collect, sandbox, answer)
        return plugin_values.submission(submission, f"{job.rollout_id}: the handler's collect()")


@asynccontextmanager
async def _prepared(resolved: ResolvedJob) -> AsyncIterator[Sandbox]:
    """Open a sandbox as it was before the policy ran."""
    assert resolved.source is not None
    async with opened(resolved.problem.job, resolved.source) as sandbox:
        await _prepare(resolved.problem, sandbox)
        yield sandbox


def _messages(problem: Problem) -> list[Message]:
    messages = problem.ask("messages()", lambda handler: handler.messages())
    return plugin_values.messages(messages, f"{problem.job.rollout_id}: the handler's messages()")


def _tools(problem: Problem, sandbox: Sandbox | None) -> dict[str, Tool]:
    rollout_id = problem.job.rollout_id
    names = problem.ask("tools", lambda handler: list(handler.tools))
    made: dict[str, Tool] = {}
    for name in names:
        with plugin_call(rollout_id, f"tool {name}", AgentError):
            made[name] = registry.tool(name)(sandbox)
    return made


async def _run_agent(resolved: ResolvedJob, context: AgentContext) -> AgentResult:
    """Run the agent under its deadline. A timeout is an outcome, or an EngineError if it waited for engines."""
    limit_s, policy = context.limits.run_s, context.policy

    async def bounded() -> AgentResult:
        # In its own task, as a SystemExit that leaves a task would stop the event loop.
        async with boundary(resolved.problem.job, f"agent {resolved.agent_name}", AgentError):
            return await resolved.agent.run(context)

    agent_run = asyncio.ensure_future(bounded())
    try:
        if await in_time(agent_run, limit_s, policy):
            return plugin_values.agent_result(agent_run.result(), context.rollout_id)
        reasons = (policy.blocked, *(model.blocked for model in context.models.values()))
        if blocked := next(filter(None, reasons), ""):
            raise EngineError(f"{context.rollout_id}: its {limit_s:g} s ended while it waited for engines: {blocked}")
        return AgentResult(Outcome.DEADLINE)
    finally:
        await ended(agent_run, context.rollout_id)


def _seeded(job: StageJob) -> SamplingParams:
    if job.batch.sampling.seed is None:
        return job.batch.sampling
    seed = rollout_seed(job.batch.sampling.seed, job.data_source, job.fields, job.group_index, job.sample_index)
    return job.batch.sampling.model_copy(update={"seed": seed})


async def _score_running(
    problem: Problem,
    sandbox: Sandbox,
    submission: Submission,
    models: Mapping[str, ChatModel],
    served: Sequence[str] = (),
) -> EarlyScore:
    """Score before the policy's sandbox is stopped, off its clock. After a failure the rollout runs again."""
    job = problem.job
    within_s = limit_s(Stage.EVAL, job.limits)
    with off_clock(within_s):
        async with (
            boundary(job, "scoring in the running sandbox", EvaluatorError, within_s),
            healthy_node(job.config.sandboxes, job.rollout_id, "scoring", EvaluatorError) as node_health,
        ):
            evaluator = problem.evaluator(models)
            if not follows(evaluator, RunningEvaluator):
                raise EvaluatorError(f"{job.rollout_id}: evaluator {evaluator.name} has no evaluate_running()")
            async with with_copied_layer(problem, sandbox, submission, restored_files(problem)) as copied:
                fresh = fresh_sandboxes(problem, node_health, copied, serving=sandbox)
                score = await evaluator.evaluate_running(copied, sandbox, fresh, job.limits.eval_s)
            score, name = _checked(score, evaluator, job)
            if served:
                score = replace(score, details={**score.details, "services": list(served)})
            if score.call_rewards or score.row_rewards:
                raise EvaluatorError(
                    f"{job.rollout_id}: evaluator {name} rewards calls or rows, which are known only after the stop"
                )
    return EarlyScore(value=score.value, details=score.details, rewards=score.rewards, evaluator=name)


async def evaluate(
    problem: Problem,
    submission: Submission,
    layer_store: LayerStore | None = None,
    models: Mapping[str, ChatModel] = NO_MODELS,
) -> tuple[Score, str]:
    """Score a submission; return the score and the evaluator's name."""
    if (early := submission.early_score) is not None:
        return Score(early.value, early.details, early.rewards), early.evaluator
    job = problem.job
    async with boundary(job, "scoring", EvaluatorError, limit_s(Stage.EVAL, job.limits)):
        evaluator = problem.evaluator(models)
        async with healthy_node(job.config.sandboxes, job.rollout_id, "scoring", EvaluatorError) as node_health:
            fresh = fresh_sandboxes(problem, node_health, submission, layer_store)
            try:
                score = await evaluator.evaluate(submission, fresh, job.limits.eval_s)
            except NothingLeft as left:
                name = plugin_values.name(evaluator.name, f"{job.rollout_id}: the evaluator's name")
                return Score(0.0, {"reason": str(left)}), name
        return _checked(score, evaluator, job)


def _checked(score: Score, evaluator: Evaluator, job: StageJob) -> tuple[Score, str]:
    name = plugin_values.name(evaluator.name, f"{job.rollout_id}: the evaluator's name")
    checked = plugin_values.score(score, f"{job.rollout_id}: evaluator {name}", job.batch.reward)
    return replace(checked, details=Redactor(job.batch.secrets.values()).json(checked.details)), name


def trained_calls(problem: Problem, calls: Sequence[ModelCall]) -> Sequence[ModelCall]:
    """Return a rollout's training calls, by the batch's rule and then the handler's. Raises HandlerError."""
    chosen = chosen_calls(problem.job.batch.train_calls, calls)
    indexes = problem.ask("train_calls()", lambda handler: set(handler.train_calls(list(chosen))))
    if unknown := indexes - {call.index for call in chosen}:
        named = sorted(map(str, unknown))[:5]
        raise HandlerError(f"{problem.job.rollout_id}: the handler's train_calls() names unknown calls: {named}")
    return [call for call in chosen if call.index in indexes]


async def discard(problem: Problem) -> None:
    """Stop the sandbox of a rollout that was cancelled between two stages."""
    source = resolve(problem).source
    if source is not None:
        try:
            sandbox = await source.provider.attach(problem.job.sandbox_id, source.spec)
        except SandboxError:
            return
        await stop_sandbox(sandbox)


async def _close(tools: Mapping[str, Tool]) -> None:
    for name, tool in tools.items():
        try:
            await tool.close()
        except BaseException as error:
            if is_cancellation(error):
                raise
            log.warning("Tool %s did not close: %s", name, described(error))


def with_calls(
    problem: Problem, submission: Submission, calls: Sequence[ModelCall], rows: Sequence[Segment]
) -> Submission:
    """Return the submission, with the model calls if its evaluator wants them."""
    if not problem.handler.scores_calls:
        return submission
    return submission.model_copy(update={"calls": submitted_calls(calls, rows)})


def rewards_of_rows(rollout_id: str, submission: Submission, score: Score, evaluator: str) -> RowRewards | None:
    """Return the rewards of single rows and turns, None if there are none. Raises EvaluatorError for unknown rows."""
    try:
        return row_rewards(submission.calls, score.call_rewards, score.row_rewards)
    except ValueError as error:
        why = "" if submission.calls else ": evaluators see the calls of handlers with scores_calls = True"
        raise EvaluatorError(f"{rollout_id}: evaluator {evaluator} rewards an unknown row: {error}{why}") from None


if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionToolParam


class RoleCalls:
    """The calls of roles' LLMs during one rollout, in the order of their answers: one JSON object each."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def of(self, models: Mapping[str, ChatModel]) -> Mapping[str, ChatModel]:
        """Return the models, wrapped so that each call is recorded here."""
        return {role: _RecordedModel(role, model, self.lines) for role, model in models.items()}

    def artefact(self) -> Artefact:
        return Artefact("role-calls.jsonl", "application/jsonl", "".join(self.lines).encode())


class _RecordedModel:
    def __init__(self, role: str, model: ChatModel, lines: list[str]) -> None:
        self._role = role
        self._model = model
        self._lines = lines

    @property
    def model(self) -> str:
        return self._model.model

    @property
    def blocked(self) -> str:
        return self._model.blocked

    async def complete(self, messages: Sequence[Message], sampling: SamplingParams) -> str:
        reply = await self._model.complete(messages, sampling)
        self._keep(messages, sampling, reply)
        return reply

    async def answer(
        self, messages: Sequence[Message], tools: Sequence[ChatCompletionToolParam], sampling: SamplingParams
    ) -> Completion:
        completion = await self._model.answer(messages, tools, sampling)
        self._keep(messages, sampling, completion.response)
        return completion

    def _keep(self, messages: Sequence[Message], sampling: SamplingParams, reply: str | Message) -> None:
        call = {
            "role": self._role,
            "model": self.model,
            "messages": list(messages),
            "sampling": sampling.model_dump(mode="json", exclude_defaults=True),
            "reply": reply,
        }
        self._lines.append(json.dumps(call) + "\n")
