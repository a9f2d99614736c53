"""One rollout to play, and the plug-ins that a stage plays it with: resolved by their names once, and passed on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from farm.errors import AgentError, FarmError, HandlerError
from farm.ids import sandbox_id
from farm.records.request import Limits, RoleEngine, SamplingParams, SandboxSpec, roles_missing
from workers import plugin_values, registry
from workers.interfaces import Agent, Evaluator, Handler, SandboxProvider
from workers.plugin_faults import call_plugin
from workers.policy.generation import EngineAddress
from workers.policy.policy import PromptRules
from workers.roles import ChatModel, RoleHandler
from workers.sandboxes.images.content_store import digest


@dataclass(frozen=True, slots=True)
class StageJob:
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
    """Name of the agent that plays it; empty for the handler's own choice."""
    group_id: str = ""
    group_index: int = 0
    rules: PromptRules = field(default_factory=PromptRules)
    engine: EngineAddress | None = None
    """The dedicated engine that it is played on; None for the farm's engines."""
    roles: Mapping[str, RoleEngine] = field(default_factory=dict)
    """The LLMs of roles besides the policy."""

    @property
    def sandbox_id(self) -> str:
        return sandbox_id(self.rollout_id, self.attempt)


@dataclass(frozen=True, slots=True)
class SandboxSource:
    """The provider and the spec of a sandbox that a rollout is played or scored in."""

    provider: SandboxProvider
    spec: SandboxSpec


@dataclass(frozen=True, slots=True)
class Problem:
    """A job with its handler and its checked instance: enough to score it."""

    job: StageJob
    handler: Handler
    instance: BaseModel

    def spec(self) -> SandboxSpec | None:
        """Return the sandbox that the instance asks for, if any."""
        what = "the handler's sandbox()"
        spec = call_plugin(self.job.rollout_id, what, HandlerError, lambda: self.handler.sandbox(self.instance))
        return plugin_values.spec(spec, f"{self.job.rollout_id}: {what}", HandlerError)

    def evaluator(self, models: Mapping[str, ChatModel]) -> Evaluator:
        """Return what scores it, with the LLMs of roles if it takes them."""
        what = "the handler's evaluator()"
        return call_plugin(self.job.rollout_id, what, HandlerError, lambda: self._evaluator(models))

    def _evaluator(self, models: Mapping[str, ChatModel]) -> Evaluator:
        if not hasattr(self.handler, "roles"):
            return self.handler.evaluator(self.instance)
        return cast(RoleHandler, self.handler).evaluator(self.instance, models)

    def shared(self) -> str:
        """Return a name for what is prepared once for all samples; empty if each is prepared by itself."""
        what = "the handler's prepares_once"
        once = call_plugin(
            self.job.rollout_id, what, HandlerError, lambda: bool(getattr(self.handler, "prepares_once", False))
        )
        return digest(self.job.data_source, dict(self.job.fields)) if once and self.job.n_samples > 1 else ""


@dataclass(frozen=True, slots=True)
class ResolvedJob:
    """A problem with the agent that plays it, and the source of the sandbox that both need; None if neither does."""

    problem: Problem
    agent: Agent
    agent_name: str
    source: SandboxSource | None


def resolve_problem(job: StageJob) -> Problem:
    """Return a job with its handler and instance. Raises HandlerError."""
    what = f"the handler of {job.data_source}"
    handler, instance = call_plugin(job.rollout_id, what, HandlerError, lambda: _instance(job))
    needs = call_plugin(job.rollout_id, f"{what}: roles()", HandlerError, lambda: needed_roles(handler, instance))
    if missing := [role for role in needs if role not in job.roles]:
        raise HandlerError(f"{job.rollout_id}: {roles_missing(job.data_source, missing)}", retryable=False)
    return Problem(job, handler, instance)


def _instance(job: StageJob) -> tuple[Handler, BaseModel]:
    try:
        handler = registry.handler(job.data_source)
        return handler, handler.instance_type.model_validate(dict(job.fields))
    except (FarmError, ValidationError) as error:
        raise HandlerError(f"{job.rollout_id}: {error}", retryable=False) from error


def needed_roles(handler: Handler, instance: BaseModel) -> Collection[str]:
    """Return the roles besides the policy that an instance needs an LLM for."""
    return list(cast(RoleHandler, handler).roles(instance)) if hasattr(handler, "roles") else ()


def resolve(job: StageJob) -> ResolvedJob:
    """Return a job with all plug-ins that start and play it. Raises RolloutError, and NotFound for no such sandbox."""
    problem = resolve_problem(job)
    name = job.agent or problem.handler.agent
    agent = call_plugin(job.rollout_id, f"agent {name}", AgentError, lambda: registry.agent(name))
    spec = problem.spec()
    what = f"agent {name}'s sandbox()"
    needs = call_plugin(job.rollout_id, what, AgentError, lambda: needed_by(agent, spec))
    source = sandbox_source(job, plugin_values.spec(needs, f"{job.rollout_id}: {what}", AgentError))
    return ResolvedJob(problem, agent, name, source)


def needed_by(agent: Agent, spec: SandboxSpec | None) -> SandboxSpec | None:
    """Return the spec that an agent needs, given what the instance needs, if anything."""
    needs = getattr(agent, "sandbox", None)
    return needs(spec) if needs is not None else spec


def sandbox_source(job: StageJob, spec: SandboxSpec | None) -> SandboxSource | None:
    """Return where a sandbox of this spec comes from: the spec's own kind, else the batch's, else the best there is."""
    if spec is None:
        return None
    kind = spec.kind if spec.kind != "auto" else job.sandbox_kind
    return SandboxSource(registry.sandbox(kind if kind != "auto" else registry.best_sandbox()), spec)
