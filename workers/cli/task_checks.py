"""Checks of Harbor tasks: each is played by its own solution and by nobody, through the stages of a rollout.

A sound task gives its solution 1 and an untouched sandbox 0; anything else is a fault of the task, or of this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from farm.tasks.known_tasks import footprint_of, keep_footprint
from workers.cli.acting_policy import ActingPolicy
from workers.cli.local_rollout import local_archive, repeated, score_job
from workers.cli.solution_policy import SolutionPolicy
from workers.interfaces import Score
from workers.stage_job import Problem, SandboxSource, StageJob
from workers.task_archives import archive_folder

_LEAST_DEPTH = 4
"""Folders of a footprint are no less deep: /usr/lib/ would be nearly all of an image."""
_N_SHOWN = 5


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
    footprint: tuple[str, ...] = ()
    """Paths that the solution changes beyond what any policy may: batches of this task may change them, too."""

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
            untouched = await repeated(partial(score_of, task, options))
            solved, note = await repeated(partial(solve, task, options))
            if solved.value < 1.0 and options.verification == "guarded" and task.instance.restore != "nothing":
                solved, note = await _by_footprint(task, options, solved, note)
            footprint = footprint_of((await job_of(task, options)).archive)
            return TaskCheck(name, solved.value, untouched.value, _fault(solved, untouched, note), footprint)
    except FarmError as error:
        return TaskCheck(name, problem=str(error))


async def _by_footprint(task: TaskFolder, options: CheckOptions, solved: Score, note: str) -> tuple[Score, str]:
    """Score a solution with all that it changed, and if it has 1 then, keep the paths by which it has.

    Returns its score with these paths as the task's footprint; the one that it had, and a note, if they do not help.
    """
    as_authors, _ = await repeated(partial(solve, task, replace(options, verification="as_authors")))
    if as_authors.value < 1.0:
        return solved, note
    archive = (await job_of(task, options)).archive
    known = footprint_of(archive)
    changed = tuple(sorted({*known, *solved.details.get("restored", ())}))
    if changed and not any(path.endswith("/") and path.count("/") < _LEAST_DEPTH for path in changed):
        await asyncio.to_thread(keep_footprint, archive, changed)
        by_footprint, _ = await repeated(partial(solve, task, options))
        if by_footprint.value >= 1.0:
            return by_footprint, ""
        await asyncio.to_thread(keep_footprint, archive, known)
    paths = ", ".join(changed[:_N_SHOWN]) or "files of pytest's configuration at /"
    return solved, f"; with `verification=as_authors` it scores 1, as it changes {paths}"


def _fault(solved: Score, untouched: Score, note: str) -> str:
    faults = []
    if solved.value < 1.0:
        faults.append(f"its solution scores {solved.value:g}, not 1{note}")
    if untouched.value > 0.0:
        faults.append(f"an untouched sandbox scores {untouched.value:g}, not 0")
    return "; ".join(faults)


async def score_of(task: TaskFolder, options: CheckOptions) -> Score:
    """Score a task whose sandbox nobody touched. Raises FarmError."""
    job = await job_of(task, options)
    return await score_job(job, lambda _, source: ActingPolicy(job.sandbox_id, source))


async def solve(task: TaskFolder, options: CheckOptions) -> tuple[Score, str]:
    """Score a task by its own solution; return the score, and what the solution said if it failed. Raises FarmError."""
    job = await job_of(task, options)
    policies: list[SolutionPolicy] = []

    def solving(problem: Problem, source: SandboxSource | None) -> SolutionPolicy:
        folder = archive_folder(job.archive)
        policies.append(SolutionPolicy(job.sandbox_id, source, task.instance, folder, job.secrets))
        return policies[-1]

    score = await score_job(job, solving)
    return score, policies[-1].failure


async def job_of(task: TaskFolder, options: CheckOptions) -> StageJob:
    """Return the job of a task that is played once, whose archive is unpacked on this node, as a batch has it."""
    request = task.request(await asyncio.to_thread(local_archive, task.path))
    return options.job(DATA_SOURCE, request["fields"], request["archive"])
