"""The run stage of one rollout: the agent runs, then the submission is collected from its sandbox.

Calls of roles' LLMs are kept as one artefact, separate from the policy's calls.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from farm.errors import AgentError, EngineError, EvaluatorError, HandlerError, RolloutError, SandboxError
from farm.plugins import follows
from farm.records.request import SamplingParams, SandboxSpec
from farm.records.rollout import Outcome, Stage
from farm.records.submission import EarlyScore
from farm.records.trajectory import Completion, Message
from farm.seeds import rollout_seed
from workers.evaluators.answer import verified
from workers.plugins import plugin_values, registry
from workers.plugins.handler import RunningEvaluator
from workers.plugins.interfaces import (
    NO_MODELS,
    AgentContext,
    AgentResult,
    Artefact,
    ChatModel,
    Keep,
    Policy,
    Record,
    Sandbox,
    SandboxProvider,
    Submission,
    Tool,
)
from workers.plugins.plugin_faults import described, is_cancellation, plugin_call
from workers.sandboxes.diagnosis import broken_from_within
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
from workers.stages.stage_job import Problem, ResolvedJob, SandboxSource, boundary, resolve, sandbox_source

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionToolParam

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunResult:
    outcome: Outcome
    submission: Submission


class RunStage:
    """The run stage of one rollout. The calls of the roles' `models` are kept as an artefact."""

    def __init__(
        self,
        problem: Problem,
        policy: Policy,
        record: Record,
        keep: Keep,
        layer_store: LayerStore | None = None,
        models: Mapping[str, ChatModel] = NO_MODELS,
    ) -> None:
        self._problem = problem
        self._job = problem.job
        self._handler = problem.handler
        self._policy = policy
        self._record = record
        self._keep = keep
        self._layer_store = layer_store or NoLayerStore()
        self._models = models
        self._role_calls = RoleCalls()
        self._redactor = Redactor(problem.job.batch.secrets.values())
        self._source: SandboxSource | None = None
        self._sandbox: Sandbox | None = None
        """The policy's sandbox, and its source; None until joined, and if the rollout needs none."""

    async def run(self) -> RunResult:
        """Join the sandbox, run the agent and collect the submission. The sandbox is stopped afterwards."""
        async with AsyncExitStack() as stack:
            async with self._boundary("joining the sandbox", SandboxError):
                resolved = resolve(self._problem)
                if (source := resolved.source) is not None:
                    self._source = source
                    self._sandbox = await source.provider.attach(self._job.sandbox_id, source.spec)
            if self._sandbox is not None:
                stack.push_async_callback(stop_sandbox, self._sandbox)
            async with self._healthy_node("the run", SandboxError) as node_health:
                node_health.use_policy_sandbox(self._sandbox)
                try:
                    run_result = await self._run(resolved, node_health)
                except (SandboxError, HandlerError) as error:
                    if not await self._policy_broke_sandbox():
                        raise
                    log.warning("Rollout %s: policy broke its sandbox: %s", self._job.rollout_id, error)
                    return RunResult(Outcome.INVALID_ACTION, Submission())
            return await self._with_layer(run_result)

    async def _run(self, resolved: ResolvedJob, node_health: NodeHealth) -> RunResult:
        fresh = fresh_sandboxes(self._problem, node_health, Submission(), policy_sandbox=self._sandbox)
        steps = TaskSteps(self._problem, self._sandbox, fresh)
        async with AsyncExitStack() as stack:
            async with self._boundary(f"agent {resolved.agent_name}", AgentError):
                context = self._context(steps)
                stack.push_async_callback(_close, context.tools)
                result = await self._run_agent(resolved, context)
                await steps.finish(result, resolved.agent_name)
                if self._role_calls.lines:
                    await context.keep(0, self._role_calls.artefact())
            submission = self._redactor.submission(await self._collect(result.answer))
            rewards = plugin_values.rewards(context.rewards, f"{self._job.rollout_id}: agent {resolved.agent_name}")
            submission = submission.model_copy(update={"rewards": rewards, "steps": self._redactor.json(steps.records)})
            served = await services_of(self._problem, self._sandbox)
            if self._sandbox is not None and (served or self._handler.scores_running):
                early = await self._score_running(self._sandbox, submission, served)
                submission = submission.model_copy(update={"early_score": early})
        return RunResult(result.outcome, submission)

    def _context(self, steps: TaskSteps) -> AgentContext:
        job, redactor = self._job, self._redactor
        messages = self._problem.ask("messages()", lambda handler: handler.messages())
        return AgentContext(
            rollout_id=job.rollout_id,
            messages=plugin_values.messages(messages, f"{job.rollout_id}: the handler's messages()"),
            tools={name: redactor.tool(tool) for name, tool in self._tools().items()},
            policy=self._policy,
            sampling=self._seeded(),
            limits=job.limits,
            record=redactor.record(self._record),
            keep=redactor.keep(self._keep),
            sandbox=self._sandbox,
            next_messages=steps.next_messages,
            instance=self._handler.instance,
            provider=self._provider,
            models=self._role_calls.of(self._models),
            agent_requests=job.batch.agent_requests,
            verify=self._verify,
        )

    def _tools(self) -> dict[str, Tool]:
        names = self._problem.ask("tools", lambda handler: list(handler.tools))
        made: dict[str, Tool] = {}
        for name in names:
            with plugin_call(self._job.rollout_id, f"tool {name}", AgentError):
                made[name] = registry.tool(name)(self._sandbox)
        return made

    def _seeded(self) -> SamplingParams:
        job, sampling = self._job, self._job.batch.sampling
        if sampling.seed is None:
            return sampling
        seed = rollout_seed(sampling.seed, job.data_source, job.fields, job.group_index, job.sample_index)
        return sampling.model_copy(update={"seed": seed})

    def _provider(self) -> SandboxProvider:
        source = sandbox_source(self._job, SandboxSpec(), Stage.RUN)
        assert source is not None
        return source.provider

    async def _verify(self, family: str, entry: Mapping[str, Any], settings: Mapping[str, Any], answer: str) -> float:
        with off_clock(self._job.limits.eval_s):
            return await verified(family, entry, settings, answer, self._job.limits.eval_s)

    async def _run_agent(self, resolved: ResolvedJob, context: AgentContext) -> AgentResult:
        """Run the agent under its deadline. A timeout is an outcome, or an EngineError if it waited for engines."""
        limit_s, policy = context.limits.run_s, context.policy

        async def bounded() -> AgentResult:
            # In its own task, as a SystemExit that leaves a task would stop the event loop.
            async with self._boundary(f"agent {resolved.agent_name}", AgentError):
                return await resolved.agent.run(context)

        agent_run = asyncio.ensure_future(bounded())
        try:
            if await in_time(agent_run, limit_s, policy):
                return plugin_values.agent_result(agent_run.result(), context.rollout_id)
            reasons = (policy.blocked, *(model.blocked for model in context.models.values()))
            if blocked := next(filter(None, reasons), ""):
                raise EngineError(
                    f"{context.rollout_id}: its {limit_s:g} s ended while it waited for engines: {blocked}"
                )
            return AgentResult(Outcome.DEADLINE)
        finally:
            await ended(agent_run, context.rollout_id)

    async def _collect(self, answer: str | None) -> Submission:
        limits = self._job.limits
        async with self._boundary("collecting the submission", HandlerError):
            collect = Collect(
                lambda where: self._handler.collect(where, answer),
                self._prepared,
                limit_s=max(limits.tool_s, self._handler.collect_s),
                start_s=limits.init_s,
            )
            submission = await collected(collect, self._sandbox, answer)
            return plugin_values.submission(submission, f"{self._job.rollout_id}: the handler's collect()")

    @asynccontextmanager
    async def _prepared(self) -> AsyncIterator[Sandbox]:
        """Open a sandbox as it was before the policy ran."""
        assert self._source is not None
        async with opened(self._job, self._source) as sandbox:
            await self._problem.prepare(sandbox)
            yield sandbox

    async def _score_running(self, sandbox: Sandbox, submission: Submission, served: Sequence[str]) -> EarlyScore:
        """Score before the policy's sandbox is stopped, off its clock. After a failure the rollout runs again."""
        problem, job = self._problem, self._job
        within_s = limit_s(Stage.EVAL, job.limits)
        with off_clock(within_s):
            async with (
                self._boundary("scoring in the running sandbox", EvaluatorError, within_s),
                self._healthy_node("scoring", EvaluatorError) as node_health,
            ):
                evaluator = problem.evaluator(self._models)
                if not follows(evaluator, RunningEvaluator):
                    raise EvaluatorError(f"{job.rollout_id}: evaluator {evaluator.name} has no evaluate_running()")
                async with with_copied_layer(problem, sandbox, submission, restored_files(problem)) as copied:
                    fresh = fresh_sandboxes(problem, node_health, copied, serving=sandbox)
                    score = await evaluator.evaluate_running(copied, sandbox, fresh, job.limits.eval_s)
                score, name = problem.checked(score, evaluator)
                if served:
                    score = replace(score, details={**score.details, "services": list(served)})
                if score.call_rewards or score.row_rewards:
                    raise EvaluatorError(
                        f"{job.rollout_id}: evaluator {name} rewards calls or rows, which are known only after the stop"
                    )
        return EarlyScore(value=score.value, details=score.details, rewards=score.rewards, evaluator=name)

    async def _policy_broke_sandbox(self) -> bool:
        if self._source is None:
            return False
        another = partial(opened, self._job, self._source)
        return await broken_from_within(self._sandbox, another, kernel="python" in self._handler.tools)

    async def _with_layer(self, run_result: RunResult) -> RunResult:
        """Stop the sandbox and keep the layer that the policy left, if the handler scores by it."""
        submission, source, sandbox = run_result.submission, self._source, self._sandbox
        if source is None or sandbox is None or not self._handler.keeps_layer or submission.early_score is not None:
            return run_result
        async with self._boundary("keeping what the policy left", SandboxError):
            layer = await keep_layer(self._job, source, sandbox, self._layer_store, restored_files(self._problem))
        return replace(run_result, submission=submission.model_copy(update={"layer": layer}))

    def _boundary(
        self, what: str, error_type: type[RolloutError], limit_s: float | None = None
    ) -> AbstractAsyncContextManager[None]:
        return boundary(self._job, what, error_type, limit_s)

    def _healthy_node(self, what: str, error_type: type[RolloutError]) -> AbstractAsyncContextManager[NodeHealth]:
        return healthy_node(self._job.config.sandboxes, self._job.rollout_id, what, error_type)


async def _close(tools: Mapping[str, Tool]) -> None:
    for name, tool in tools.items():
        try:
            await tool.close()
        except BaseException as error:
            if is_cancellation(error):
                raise
            log.warning("Tool %s did not close: %s", name, described(error))


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
