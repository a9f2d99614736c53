"""One rollout and the plug-ins that its stages use: resolved by name once, then passed on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from farm.errors import AgentError, AgentMissing, FarmError, HandlerError, NotFound
from farm.ids import sandbox_id
from farm.plugins import follows
from farm.records.request import (
    AgentRequests,
    Limits,
    RoleEngine,
    SamplingParams,
    SandboxSpec,
    TrainCalls,
    VerificationRule,
    roles_missing,
)
from farm.records.rollout import Stage
from farm.records.task_needs import NetworkRule, TaskNeeds, unsupported
from workers.plugins import plugin_values, registry
from workers.plugins.handler_options import (
    BoundHandler,
    HasNeeds,
    HasTaskTimes,
    TaskContext,
    keeps_layer,
    without_sandbox,
)
from workers.plugins.interfaces import Agent, Evaluator, Handler, SandboxProvider
from workers.plugins.plugin_faults import call_plugin
from workers.plugins.roles import ChatModel, RoleHandler
from workers.policy.generation import EngineAddress
from workers.policy.policy import PromptRules
from workers.sandboxes.images.content_store import digest
from workers.stages.task_archives import archive_folder


@dataclass(frozen=True, slots=True)
class StageJob:
    """One rollout: everything that the stages need to know of it."""

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
    """Name of the agent; empty for the handler's default."""
    group_id: str = ""
    group_index: int = 0
    rules: PromptRules = field(default_factory=PromptRules)
    engine: EngineAddress | None = None
    """The batch's dedicated engine; None for the farm's engines."""
    reward: str | Mapping[str, float] = ""
    """The batch's rule for the reward that counts; empty leaves it to the evaluator."""
    network: NetworkRule = "refuse"
    verification: VerificationRule = "guarded"
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    archive: str = ""
    """The digest of the instance's task archive; empty if it has none."""
    roles: Mapping[str, RoleEngine] = field(default_factory=dict)
    """The LLMs of roles besides the policy."""
    agent_requests: AgentRequests = field(default_factory=AgentRequests)
    train_calls: TrainCalls = field(default_factory=TrainCalls)
    row_builder: str = "prefix"

    @property
    def all_secrets(self) -> list[str]:
        """Return the batch's secrets, and the API keys of its LLMs."""
        keys = [] if self.engine is None else [self.engine.key]
        return [*self.secrets.values(), *keys, *(role.engine_key for role in self.roles.values() if role.engine_key)]

    @property
    def sandbox_id(self) -> str:
        return sandbox_id(self.rollout_id, self.attempt)


@dataclass(frozen=True, slots=True)
class SandboxSource:
    """The provider and the spec of a sandbox."""

    provider: SandboxProvider
    spec: SandboxSpec


@dataclass(frozen=True, slots=True)
class Problem:
    """A job with its handler and validated instance: sufficient for scoring."""

    job: StageJob
    handler: Handler
    instance: BaseModel

    def spec(self) -> SandboxSpec | None:
        """Return the sandbox spec of the instance, if any."""
        what = "the handler's sandbox()"
        spec = call_plugin(self.job.rollout_id, what, HandlerError, lambda: self.handler.sandbox(self.instance))
        if spec is not None and without_sandbox(self.handler):
            reason = f"{what} asks for one, though it declares without_sandbox"
            raise HandlerError(f"{self.job.rollout_id}: {reason}", retryable=False)
        return plugin_values.spec(spec, f"{self.job.rollout_id}: {what}", HandlerError)

    def evaluator(self, models: Mapping[str, ChatModel]) -> Evaluator:
        """Return the evaluator, with the LLMs of roles if it accepts them."""
        what = "the handler's evaluator()"
        return call_plugin(self.job.rollout_id, what, HandlerError, lambda: self._evaluator(models))

    def _evaluator(self, models: Mapping[str, ChatModel]) -> Evaluator:
        if not hasattr(self.handler, "roles"):
            return self.handler.evaluator(self.instance)
        return cast(RoleHandler, self.handler).evaluator(self.instance, models)

    def shared(self) -> str:
        """Return a key for files that are prepared once for all samples; empty if each sample is prepared separately.

        Samples of handlers that keep the layer are prepared separately, as the layer must hold all files above the
        image.
        """
        if keeps_layer(self.handler):
            return ""
        what = "the handler's prepares_once"
        once = call_plugin(
            self.job.rollout_id, what, HandlerError, lambda: bool(getattr(self.handler, "prepares_once", False))
        )
        return (
            digest(self.job.data_source, dict(self.job.fields), self.job.archive)
            if once and self.job.n_samples > 1
            else ""
        )


@dataclass(frozen=True, slots=True)
class ResolvedJob:
    """A problem with its agent, and the source of the sandbox that both need; None if neither needs one."""

    problem: Problem
    agent: Agent
    agent_name: str
    source: SandboxSource | None


def resolve_problem(job: StageJob) -> Problem:
    """Return a job with its handler and instance, and with the task's own time limits. Raises HandlerError."""
    what = f"the handler of {job.data_source}"
    return call_plugin(job.rollout_id, what, HandlerError, lambda: _problem(job))


def _problem(job: StageJob) -> Problem:
    try:
        handler = registry.handler(job.data_source)
        instance = handler.instance_type.model_validate(dict(job.fields))
    except (FarmError, ValidationError) as error:
        raise HandlerError(f"{job.rollout_id}: {error}", retryable=False) from error
    # Checked at submit too, but the client may not have had this handler.
    if follows(handler, HasNeeds) and (reasons := unsupported(handler.needs(instance), None, job.network)):
        raise HandlerError(f"{job.rollout_id}: it asks for {'; '.join(reasons)}", retryable=False)
    if missing := [role for role in needed_roles(handler, instance) if role not in job.roles]:
        raise HandlerError(f"{job.rollout_id}: {roles_missing(job.data_source, missing)}", retryable=False)
    if follows(handler, HasTaskTimes):
        job = replace(job, limits=job.limits.with_task_times(handler.task_times(instance)))
    if follows(handler, BoundHandler):
        folder = archive_folder(job.archive) if job.archive else None
        handler = handler.for_task(TaskContext(folder, job.archive, job.secrets, job.limits, job.verification))
    return Problem(job, handler, instance)


def needed_roles(handler: Handler, instance: BaseModel) -> Collection[str]:
    """Return the roles besides the policy for which an instance needs an LLM."""
    return list(cast(RoleHandler, handler).roles(instance)) if hasattr(handler, "roles") else ()


def resolve(problem: Problem) -> ResolvedJob:
    """Return a problem with its agent and sandbox. Raises RolloutError, and NotFound if no such sandbox can run."""
    job = problem.job
    name = job.agent or problem.handler.agent
    agent = call_plugin(job.rollout_id, f"agent {name}", AgentMissing, lambda: _agent(job.rollout_id, name))
    spec = problem.spec()
    what = f"agent {name}'s sandbox()"
    needs = call_plugin(job.rollout_id, what, AgentError, lambda: needed_by(agent, spec))
    source = sandbox_source(job, plugin_values.spec(needs, f"{job.rollout_id}: {what}", AgentError))
    return ResolvedJob(problem, agent, name, source)


def _agent(rollout_id: str, name: str) -> Agent:
    try:
        return registry.agent(name)
    except NotFound as error:
        raise AgentMissing(f"{rollout_id}: {error}", retryable=False) from error


def needed_by(agent: Agent, spec: SandboxSpec | None) -> SandboxSpec | None:
    """Return the spec that an agent needs, given the instance's spec, if any."""
    needs = getattr(agent, "sandbox", None)
    return needs(spec) if needs is not None else spec


def sandbox_source(job: StageJob, spec: SandboxSpec | None, phase: Stage | None = None) -> SandboxSource | None:
    """Return the source of a sandbox: the spec's own kind, else the batch's, else the best available.

    The network follows the batch's rule; `phase` is the only stage that uses the sandbox, None for all. Raises
    HandlerError for a spec that the batch does not permit.
    """
    if spec is None:
        return None
    kind = spec.kind if spec.kind != "auto" else job.sandbox_kind
    permitted = _permitted(job, spec, phase)
    return SandboxSource(registry.sandbox(kind if kind != "auto" else registry.best_sandbox()), permitted)


def _permitted(job: StageJob, spec: SandboxSpec, phase: Stage | None) -> SandboxSpec:
    if reasons := unsupported(TaskNeeds(), spec, job.network):
        raise HandlerError(f"{job.rollout_id}: it asks for {reasons[0]}", retryable=False)
    if not (spec.network or spec.network_in):
        return spec
    if job.network == "off":
        return spec.model_copy(update={"network": False, "network_in": ()})
    if phase is None or spec.network:
        return spec
    return spec.model_copy(update={"network": phase.value in spec.network_in, "network_in": ()})
