"""Scoring in a running sandbox: its services, and a copy of its layer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from farm.errors import HandlerError
from farm.plugins import follows
from farm.records.rollout import Stage
from workers.plugins.handler_options import RestoredFiles, ScoresServices, keeps_layer
from workers.plugins.interfaces import Sandbox, Submission
from workers.plugins.plugin_faults import call_plugin
from workers.sandboxes.sandbox import NodeSandbox
from workers.sandboxes.service_relay import services
from workers.stages.left_layer import copied_layer
from workers.stages.stage_job import Problem, sandbox_source


async def services_of(problem: Problem, sandbox: Sandbox | None) -> list[str]:
    """Return the sandbox's listening services, if the instance's tests may use them."""
    handler = problem.handler
    if not isinstance(sandbox, NodeSandbox) or not follows(handler, ScoresServices):
        return []
    what = "the handler's tests_services()"
    asked = call_plugin(problem.job.rollout_id, what, HandlerError, lambda: handler.tests_services(problem.instance))
    return [" ".join(map(str, address)) for address in await services(sandbox)] if asked else []


@asynccontextmanager
async def with_copied_layer(
    problem: Problem, sandbox: Sandbox, submission: Submission, restored: RestoredFiles | None
) -> AsyncIterator[Submission]:
    """Yield the submission with a copy of the sandbox's current layer, if the handler keeps layers."""
    source = sandbox_source(problem.job, problem.spec(), Stage.EVAL) if keeps_layer(problem.handler) else None
    if source is None:
        yield submission
        return
    async with copied_layer(problem.job, source, sandbox, restored) as layer:
        yield submission.model_copy(update={"layer": layer})
