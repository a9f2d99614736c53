"""The three stages as async functions of plain values, without Celery or SQL: they can be called in a REPL.

The return values of plug-ins are validated by `workers/plugins/plugin_values.py` before they leave a stage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from farm.errors import EvaluatorError, HandlerError, SandboxError
from farm.records.rollout import Stage
from farm.records.submission import RowRewards, row_rewards, submitted_calls
from farm.records.trajectory import ModelCall, Segment
from farm.row_builders import chosen_calls
from workers.plugins import plugin_values
from workers.plugins.handler import NothingLeft
from workers.plugins.interfaces import NO_MODELS, ChatModel, Keep, Policy, Record, Score, Submission
from workers.sandboxes.optional_protocols import shares_layers
from workers.stages.fresh_sandboxes import fresh_sandboxes, stop_sandbox
from workers.stages.left_layer import LayerStore
from workers.stages.node_shortage import healthy_node
from workers.stages.run_clock import limit_s
from workers.stages.run_stage import RunResult, RunStage
from workers.stages.stage_job import Problem, SandboxSource, boundary, resolve


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
        await shares.start_prepared(job.sandbox_id, source.spec, shared, problem.prepare)
        return
    sandbox = await provider.start(job.sandbox_id, source.spec)
    try:
        await problem.prepare(sandbox)
        if "init" in source.spec.network_in and "run" not in source.spec.network_in:
            # Processes started with the network would keep it.
            await sandbox.exec(["bash", "-c", "kill -9 -1"], timeout_s=job.limits.tool_s)
    except BaseException:
        await asyncio.shield(sandbox.stop())
        raise


async def run(
    problem: Problem,
    policy: Policy,
    record: Record,
    keep: Keep,
    layer_store: LayerStore | None = None,
    models: Mapping[str, ChatModel] = NO_MODELS,
) -> RunResult:
    """Run the agent, then collect the submission from the sandbox. The sandbox is stopped afterwards."""
    return await RunStage(problem, policy, record, keep, layer_store, models).run()


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
        return problem.checked(score, evaluator)


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
