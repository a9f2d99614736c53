"""Checks of Harbor tasks: each is played by its own solution and by nobody, through the stages of a rollout.

A sound task gives its solution 1 and an untouched sandbox 0; anything else is a fault of the task, or of this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from farm.errors import FarmError
from farm.records.request import Limits, SamplingParams, VerificationRule
from farm.records.task_needs import NetworkRule, unsupported
from farm.tasks.harbor_folder import TaskFolder, task_folder
from farm.tasks.harbor_instance import DATA_SOURCE
from farm.tasks.harbor_needs import needs_of
from workers.cli.acting_policy import ActingPolicy
from workers.cli.local_rollout import local_archive, repeated, score_job
from workers.cli.solution_policy import SolutionPolicy
from workers.stage_job import Problem, SandboxSource, StageJob
from workers.task_archives import archive_folder


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The parts of a batch that a check needs, and how many tasks are played at a time."""

    sandbox: str = "auto"
    network: NetworkRule = "refuse"
    verification: VerificationRule = "guarded"
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    reward: str = ""
    limits: Limits = field(default_factory=Limits)
    n_parallel: int = 2

    def job(self, data_source: str, fields: Mapping[str, Any], archive: str = "") -> StageJob:
        """Return the job of a rollout that is played once."""
        return StageJob(
            rollout_id=f"check-{uuid4().hex[:12]}.0.0",
            attempt=1,
            sample_index=0,
            data_source=data_source,
            fields=fields,
            sampling=SamplingParams(),
            limits=self.limits,
            sandbox_kind=self.sandbox,
            model="",
            reward=self.reward,
            network=self.network,
            verification=self.verification,
            secrets=dict(self.secrets),
            archive=archive,
        )


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """The scores of one task: of its solution and of an untouched sandbox; None where there is none, and why."""

    name: str
    solved: float | None = None
    untouched: float | None = None
    problem: str = ""

    @property
    def sound(self) -> bool:
        """True if the solution has 1 and an untouched sandbox 0, or less."""
        return not self.problem and self.solved is not None and self.solved >= 1.0 and (self.untouched or 0.0) <= 0.0


async def checked(paths: Sequence[Path], options: CheckOptions, tell: Callable[[TaskCheck], None]) -> list[TaskCheck]:
    """Check the tasks of these folders, so many at a time; `tell` is called with each as it ends."""
    room = asyncio.Semaphore(options.n_parallel)

    async def one(path: Path) -> TaskCheck:
        async with room:
            result = await _checked(path, options)
        tell(result)
        return result

    return list(await asyncio.gather(*map(one, paths)))


async def _checked(path: Path, options: CheckOptions) -> TaskCheck:
    name = path.name
    try:
        with task_folder(path) as task:
            name = task.name
            if reasons := unsupported(needs_of(task.instance), None, options.network):
                return TaskCheck(name, problem=f"it asks for {'; '.join(reasons)}")
            untouched, _ = await repeated(partial(score_of, task, options, solves=False))
            solved, note = await repeated(partial(score_of, task, options, solves=True))
            return TaskCheck(name, solved, untouched, _fault(solved, untouched, note))
    except FarmError as error:
        return TaskCheck(name, problem=str(error))


def _fault(solved: float, untouched: float, note: str) -> str:
    faults = []
    if solved < 1.0:
        faults.append(f"its solution scores {solved:g}, not 1{note}")
    if untouched > 0.0:
        faults.append(f"an untouched sandbox scores {untouched:g}, not 0")
    return "; ".join(faults)


async def score_of(task: TaskFolder, options: CheckOptions, *, solves: bool) -> tuple[float, str]:
    """Play and score a task once; return its reward, and what the solution said if it failed."""
    job = await job_of(task, options)
    if not solves:
        return (await score_job(job, lambda _, source: ActingPolicy(job.sandbox_id, source))).value, ""
    policies: list[SolutionPolicy] = []

    def solving(problem: Problem, source: SandboxSource | None) -> SolutionPolicy:
        folder = archive_folder(job.archive)
        policies.append(SolutionPolicy(job.sandbox_id, source, task.instance, folder, job.secrets))
        return policies[-1]

    score = await score_job(job, solving)
    return score.value, policies[-1].failure


async def job_of(task: TaskFolder, options: CheckOptions) -> StageJob:
    """Return the job of a task that is played once, whose archive is unpacked on this node."""
    fields = task.instance.model_dump(mode="json", exclude_unset=True)
    return options.job(DATA_SOURCE, fields, await asyncio.to_thread(local_archive, task.path))
