"""One rollout in this process, without farm or engine: it runs through the stages and is scored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeVar

from farm.client.verb_groups import PART_BYTES
from farm.errors import RolloutError
from farm.records.trajectory import ModelCall
from farm.task_archive import pack
from workers.plugins.interfaces import Artefact, Policy, Score
from workers.sandboxes.lifecycle import layers
from workers.stages import stage_functions
from workers.stages.stage_job import Problem, SandboxSource, StageJob, resolve, resolve_problem
from workers.stages.task_archives import fetch_archive

N_ATTEMPTS = 3
T = TypeVar("T")


async def score_job(job: StageJob, policy_of: Callable[[Problem, SandboxSource | None], Policy]) -> Score:
    """Run a job with a policy, which is created for its sandbox if it has one, and score it. Raises FarmError."""
    problem = await asyncio.to_thread(resolve_problem, job)
    await stage_functions.init(problem)
    policy = policy_of(problem, resolve(problem).source)
    run_result = await stage_functions.run(problem, policy, _forget_call, _forget_artefact)
    try:
        score, _ = await stage_functions.evaluate(problem, run_result.submission)
    finally:
        if run_result.submission.layer is not None:
            await asyncio.to_thread(layers.discard, run_result.submission.layer.name)
    return score


async def repeated(scoring: Callable[[], Awaitable[T]]) -> T:
    """Score with a farm's number of attempts, as a fault of this machine may be temporary. Raises FarmError."""
    for _ in range(N_ATTEMPTS - 1):
        try:
            return await scoring()
        except RolloutError as error:
            if not error.retryable:
                raise
    return await scoring()


def local_archive(path: Path) -> str:
    """Add a folder to the unpacked archives of this node, if missing; return its digest. Blocks."""
    with TemporaryFile() as archive:
        name = pack(path, archive)

        def part(number: int) -> bytes | None:
            archive.seek(number * PART_BYTES)
            return archive.read(PART_BYTES) or None

        fetch_archive(name, part)
    return name


async def _forget_call(call: ModelCall) -> None:
    """Record nothing."""


async def _forget_artefact(turn: int, artefact: Artefact) -> str:
    """Keep nothing."""
    return ""
