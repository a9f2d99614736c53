"""Sandboxes in addition to the policy's, for evaluators and for handlers that compare the two; and scoring in the
policy's own, while it runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from farm.errors import EvaluatorError, SandboxError
from farm.ids import eval_sandbox_id
from farm.records.request import SandboxSpec
from farm.records.rollout import Stage
from workers.plugins.handler import NothingLeft, RestoredFiles
from workers.plugins.interfaces import FreshSandbox, Sandbox, Submission
from workers.plugins.plugin_faults import described, is_cancellation
from workers.sandboxes.sandbox import NodeSandbox
from workers.sandboxes.service_relay import relayed, services
from workers.stages.left_layer import LayerStore, NoLayerStore, copied_layer, open_layer
from workers.stages.node_shortage import NodeHealth
from workers.stages.stage_job import Problem, SandboxSource, StageJob, boundary, sandbox_source

log = logging.getLogger(__name__)


def fresh_sandboxes(
    problem: Problem,
    node_health: NodeHealth,
    submission: Submission,
    layer_store: LayerStore | None = None,
    policy_sandbox: Sandbox | None = None,
    serving: Sandbox | None = None,
) -> FreshSandbox:
    """Return a function that opens a fresh sandbox, or one with the policy's files; one at a time.

    With `policy_sandbox`, these are the current files of that sandbox. Services of `policy_sandbox` or `serving` are
    reachable from a sandbox with the policy's files.
    """
    job, serving = problem.job, serving or policy_sandbox

    @asynccontextmanager
    async def fresh(spec: SandboxSpec | None = None, *, layer: bool = False) -> AsyncIterator[Sandbox]:
        if layer and not problem.handler.keeps_layer:
            raise EvaluatorError(
                f"{job.rollout_id}: handler {job.data_source} keeps no layer: set its attribute keeps_layer = True"
            )
        # Not before the first is opened: most evaluators need none.
        source = sandbox_source(job, spec if spec is not None else problem.spec(), Stage.EVAL)
        if source is None:
            raise EvaluatorError(f"{job.rollout_id}: handler {job.data_source} scores in a sandbox but asks for none")
        async with AsyncExitStack() as stack:
            start, left = None, submission.layer
            if layer and policy_sandbox is not None:
                left = await stack.enter_async_context(
                    copied_layer(job, source, policy_sandbox, restored_files(problem))
                )
            if layer and left is None:
                raise NothingLeft("the policy broke its sandbox: nothing is left to score")
            if layer and left is not None:
                start = partial(open_layer, job, source, problem.spec(), left, layer_store or NoLayerStore())
            sandbox = await stack.enter_async_context(opened(job, source, start))
            await stack.enter_async_context(node_health.using(sandbox))
            if layer and isinstance(serving, NodeSandbox) and isinstance(sandbox, NodeSandbox):
                await stack.enter_async_context(relayed(serving, sandbox))
            yield sandbox

    return fresh


@asynccontextmanager
async def opened(
    job: StageJob, source: SandboxSource, start: Callable[[str], Awaitable[Sandbox]] | None = None
) -> AsyncIterator[Sandbox]:
    """Yield an additional sandbox, started by `start` if given."""
    name = eval_sandbox_id(job.sandbox_id)
    async with boundary(job, f"starting the sandbox {name}", SandboxError, job.limits.init_s):
        sandbox = await (start(name) if start is not None else source.provider.start(name, source.spec))
    try:
        yield sandbox
    finally:
        await stop_sandbox(sandbox)


async def stop_sandbox(sandbox: Sandbox) -> None:
    """Stop a sandbox even while being cancelled; if that fails, the node's sweep removes it."""
    try:
        await asyncio.shield(sandbox.stop())
    except BaseException as error:
        if is_cancellation(error):
            raise
        log.warning("Sandbox %s did not stop: %s", sandbox.sandbox_id, described(error))


def restored_files(problem: Problem) -> RestoredFiles | None:
    """Return the files of the policy's layer that are restored from the image; None for none."""
    return problem.ask("restored()", lambda handler: handler.restored())


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
