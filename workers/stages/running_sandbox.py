"""Scoring in a running sandbox: its services, and a copy of its layer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from farm.records.rollout import Stage
from workers.plugins.handler import RestoredFiles
from workers.plugins.interfaces import Sandbox, Submission
from workers.sandboxes.sandbox import NodeSandbox
from workers.sandboxes.service_relay import services
from workers.stages.left_layer import copied_layer
from workers.stages.stage_job import Problem, sandbox_source


async def services_of(problem: Problem, sandbox: Sandbox | None) -> list[str]:
    """Return the sandbox's listening services, if the instance's tests may use them."""
    if not isinstance(sandbox, NodeSandbox) or not problem.ask("tests_services()", lambda each: each.tests_services()):
        return []
    return [" ".join(map(str, address)) for address in await services(sandbox)]


@asynccontextmanager
async def with_copied_layer(
    problem: Problem, sandbox: Sandbox, submission: Submission, restored: RestoredFiles | None
) -> AsyncIterator[Submission]:
    """Yield the submission with a copy of the sandbox's current layer, if the handler keeps layers."""
    source = sandbox_source(problem.job, problem.spec(), Stage.EVAL) if problem.handler.keeps_layer else None
    if source is None:
        yield submission
        return
    async with copied_layer(problem.job, source, sandbox, restored) as layer:
        yield submission.model_copy(update={"layer": layer})
