"""Checks of Harbor tasks: each is played by its own solution and by nobody, through the stages of a rollout.

A sound task gives its solution 1 and an untouched sandbox 0; anything else is a fault of the task, or of this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from uuid import uuid4

from farm.client.archive_uploads import PART_BYTES
from farm.errors import FarmError, RolloutError
from farm.records.request import Limits, SamplingParams, VerificationRule
from farm.records.task_needs import NetworkRule, unsupported
from farm.records.trajectory import ModelCall
from farm.task_archive import pack
from farm.tasks.harbor_folder import TaskFolder, task_folder
from farm.tasks.harbor_instance import DATA_SOURCE
from farm.tasks.harbor_needs import needs_of
from workers import stages
from workers.cli.solution_policy import SolutionPolicy
from workers.interfaces import Artefact
from workers.stage_job import StageJob, resolve, resolve_problem
from workers.task_archives import archive_folder, fetch_archive

_SHOWN = 300
_N_ATTEMPTS = 3


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
            untouched, _ = await _repeated(task, options, solves=False)
            solved, note = await _repeated(task, options, solves=True)
            return TaskCheck(name, solved, untouched, _fault(solved, untouched, note))
    except FarmError as error:
        return TaskCheck(name, problem=str(error))


async def _repeated(task: TaskFolder, options: CheckOptions, *, solves: bool) -> tuple[float, str]:
    """Score as often as a farm would: what this machine broke may go well the next time. Raises FarmError."""
    for _ in range(_N_ATTEMPTS - 1):
        try:
            return await score_of(task, options, solves=solves)
        except RolloutError as error:
            if not error.retryable:
                raise
    return await score_of(task, options, solves=solves)


def _fault(solved: float, untouched: float, note: str) -> str:
    faults = []
    if solved < 1.0:
        faults.append(f"its solution scores {solved:g}, not 1{note}")
    if untouched > 0.0:
        faults.append(f"an untouched sandbox scores {untouched:g}, not 0")
    return "; ".join(faults)


async def score_of(task: TaskFolder, options: CheckOptions, *, solves: bool) -> tuple[float, str]:
    """Play and score a task once; return its reward, and what the solution said if it failed."""
    key = uuid4().hex[:12]
    job = StageJob(
        rollout_id=f"check-{key}.0.{int(solves)}",
        attempt=1,
        sample_index=0,
        data_source=DATA_SOURCE,
        fields=task.instance.model_dump(mode="json", exclude_unset=True),
        sampling=SamplingParams(),
        limits=options.limits,
        sandbox_kind=options.sandbox,
        model="",
        reward=options.reward,
        network=options.network,
        verification=options.verification,
        secrets=dict(options.secrets),
        archive=await asyncio.to_thread(local_archive, task.path),
    )
    problem = resolve_problem(job)
    await stages.init(problem)
    resolved = resolve(problem)
    assert resolved.source is not None
    policy = SolutionPolicy(
        task.instance,
        archive_folder(job.archive),
        resolved.source.provider,
        job.sandbox_id,
        resolved.source.spec,
        job.secrets,
        solves=solves,
    )
    played = await stages.run(problem, policy, _forget_call, _forget_artefact)
    score, _ = await stages.evaluate(problem, played.submission)
    return score.value, _failed(policy)


def local_archive(path: Path) -> str:
    """Put a folder among the unpacked archives of this node, if it is not there; return its digest. Blocks."""
    with TemporaryFile() as archive:
        name = pack(path, archive)

        def part(number: int) -> bytes | None:
            archive.seek(number * PART_BYTES)
            return archive.read(PART_BYTES) or None

        fetch_archive(name, part)
    return name


def _failed(policy: SolutionPolicy) -> str:
    for result in policy.results:
        if result.code != 0:
            said = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-_SHOWN:]
            end = "was out of time" if result.timed_out else f"ended with {result.code}"
            return f"; it {end}: {said}"
    return ""


async def _forget_call(call: ModelCall) -> None:
    """Record nothing."""


async def _forget_artefact(turn: int, artefact: Artefact) -> str:
    """Keep nothing."""
    return ""
