"""One rollout and the plug-ins that its stages use: resolved by name once, passed on, and called within a boundary."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from farm.errors import AgentError, AgentMissing, FarmError, HandlerError, NotFound, RolloutError
from farm.ids import sandbox_id
from farm.records.request import BatchSettings, Limits, SandboxSpec, roles_missing
from farm.records.rollout import Stage
from farm.records.task_needs import TaskNeeds, unsupported
from workers.config import WorkerConfig, own_config
from workers.plugins import plugin_values, registry
from workers.plugins.handler import Handler, TaskContext
from workers.plugins.interfaces import Agent, ChatModel, Evaluator, Sandbox, SandboxProvider, Score
from workers.plugins.plugin_faults import described, plugin_call
from workers.policy.generation import EngineAddress
from workers.policy.policy import PromptRules
from workers.sandboxes.images.content_store import digest
from workers.stage_clock import deadline
from workers.stages.redaction import Redactor
from workers.stages.task_archives import archive_folder

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StageJob:
    """One rollout: everything that the stages need to know of it."""

    rollout_id: str
    attempt: int
    sample_index: int
    data_source: str
    fields: Mapping[str, Any]
    batch: BatchSettings = field(default_factory=BatchSettings)
    """The batch's settings, with the task's own time limits once it is resolved."""
    sandbox_kind: str = "auto"
    group_id: str = ""
    group_index: int = 0
    rules: PromptRules = field(default_factory=PromptRules)
    engine: EngineAddress | None = None
    """The batch's dedicated engine; None for the farm's engines."""
    archive: str = ""
    """The digest of the instance's task archive; empty if it has none."""
    config: WorkerConfig = field(default_factory=own_config)

    @property
    def limits(self) -> Limits:
        return self.batch.limits

    @property
    def all_secrets(self) -> list[str]:
        """Return the batch's secrets, and the API keys of its LLMs."""
        keys = [] if self.engine is None else [self.engine.key]
        keys += [role.engine_key for role in self.batch.roles.values() if role.engine_key]
        return [*self.batch.secrets.values(), *keys]

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
    """A job with its handler: sufficient for scoring."""

    job: StageJob
    handler: Handler[Any]

    def ask(self, method: str, question: Callable[[Handler[Any]], T]) -> T:
        """Return the answer of a method of the handler. Raises HandlerError, which names the method."""
        with plugin_call(self.job.rollout_id, f"the handler's {method}", HandlerError):
            return question(self.handler)

    def spec(self) -> SandboxSpec | None:
        """Return the sandbox spec of the instance, if any."""
        what = f"{self.job.rollout_id}: the handler's sandbox()"
        spec = self.ask("sandbox()", lambda handler: handler.sandbox())
        if spec is not None and self.handler.without_sandbox:
            raise HandlerError(f"{what} asks for one, though it declares without_sandbox", retryable=False)
        return plugin_values.spec(spec, what, HandlerError)

    def evaluator(self, models: Mapping[str, ChatModel]) -> Evaluator:
        """Return the evaluator, which may call the LLMs of roles."""
        return self.ask("evaluator()", lambda handler: handler.evaluator(models))

    async def prepare(self, sandbox: Sandbox) -> None:
        """Prepare the instance's files in its sandbox. Raises HandlerError."""
        async with boundary(self.job, "preparing the sandbox", HandlerError):
            await self.handler.prepare(sandbox)

    def checked(self, score: Score, evaluator: Evaluator) -> tuple[Score, str]:
        """Return an evaluator's score, validated and without secrets, and its name. Raises EvaluatorError."""
        name = plugin_values.name(evaluator.name, f"{self.job.rollout_id}: the evaluator's name")
        checked = plugin_values.score(score, f"{self.job.rollout_id}: evaluator {name}", self.job.batch.reward)
        return replace(checked, details=Redactor(self.job.batch.secrets.values()).json(checked.details)), name

    def shared(self) -> str:
        """Return a key for files that are prepared once for all samples; empty if each sample is prepared separately.

        Samples of handlers that keep the layer are prepared separately, as the layer must hold all files above the
        image.
        """
        handler, job = self.handler, self.job
        if handler.keeps_layer or not handler.prepares_once or job.batch.n_samples < 2:
            return ""
        return digest(job.data_source, dict(job.fields), job.archive)


@dataclass(frozen=True, slots=True)
class ResolvedJob:
    """A problem with its agent, and the source of the sandbox that both need; None if neither needs one."""

    problem: Problem
    agent: Agent
    agent_name: str
    source: SandboxSource | None


def resolve_problem(job: StageJob) -> Problem:
    """Return a job with its handler and instance, and with the task's own time limits. Raises HandlerError."""
    with plugin_call(job.rollout_id, f"the handler of {job.data_source}", HandlerError):
        return _problem(job)


def _problem(job: StageJob) -> Problem:
    try:
        kind = registry.handler(job.data_source)
        instance = kind.instance_type.model_validate(dict(job.fields))
    except (FarmError, ValidationError) as error:
        raise HandlerError(f"{job.rollout_id}: {error}", retryable=False) from error
    handler = kind(instance)
    # Checked at submit too, but the client may not have had this handler.
    if reasons := unsupported(handler.needs(), None, job.batch.network):
        raise HandlerError(f"{job.rollout_id}: it asks for {'; '.join(reasons)}", retryable=False)
    if missing := [role for role in handler.roles() if role not in job.batch.roles]:
        raise HandlerError(f"{job.rollout_id}: {roles_missing(job.data_source, missing)}", retryable=False)
    limits = job.limits.with_task_times(handler.task_times())
    job = replace(job, batch=job.batch.model_copy(update={"limits": limits}))
    folder = archive_folder(job.config.archives_folder, job.archive) if job.archive else None
    return Problem(job, kind(instance, TaskContext(job.batch, folder, job.archive, job.config)))


def resolve(problem: Problem) -> ResolvedJob:
    """Return a problem with its agent and sandbox. Raises RolloutError, and NotFound if no such sandbox can run."""
    job = problem.job
    name = job.batch.agent or problem.handler.agent
    with plugin_call(job.rollout_id, f"agent {name}", AgentMissing):
        agent = _agent(job.rollout_id, name)
    spec = problem.spec()
    what = f"agent {name}'s sandbox()"
    with plugin_call(job.rollout_id, what, AgentError):
        needs = needed_by(agent, spec)
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
    permitted = _permitted(job, spec, phase)
    return SandboxSource(registry.chosen_sandbox(spec.kind, job.sandbox_kind), permitted)


def _permitted(job: StageJob, spec: SandboxSpec, phase: Stage | None) -> SandboxSpec:
    if reasons := unsupported(TaskNeeds(), spec, job.batch.network):
        raise HandlerError(f"{job.rollout_id}: it asks for {reasons[0]}", retryable=False)
    if not (spec.network or spec.network_in):
        return spec
    if job.batch.network == "off":
        return spec.model_copy(update={"network": False, "network_in": ()})
    if phase is None or spec.network:
        return spec
    return spec.model_copy(update={"network": phase.value in spec.network_in, "network_in": ()})


@asynccontextmanager
async def boundary(
    job: StageJob, what: str, error_type: type[RolloutError], limit_s: float | None = None
) -> AsyncIterator[None]:
    """Call a plug-in as in `plugin_call`, within `limit_s` seconds by the stage's clock."""
    with plugin_call(job.rollout_id, what, error_type):
        try:
            async with deadline(limit_s):
                yield
        except TimeoutError as error:
            limit = f" took longer than {limit_s:g} s" if limit_s is not None else f" timed out: {described(error)}"
            raise error_type(f"{job.rollout_id}: {what}{limit}") from error
