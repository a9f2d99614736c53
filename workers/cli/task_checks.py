"""Checks of Harbor tasks: each is run with its own solution and with no work, through the stages of a rollout.

A sound task scores its solution 1 and an untouched sandbox 0; otherwise the task, or this machine, is at fault.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

import farm
import workers
from farm.errors import FarmError
from farm.records.request import BatchSettings, Limits, SandboxSpec, VerificationRule
from farm.records.task_needs import NetworkRule, unsupported
from farm.settings import settings
from farm.tasks.harbor_folder import TaskFolder, task_folder
from farm.tasks.harbor_instance import DATA_SOURCE, needs_of
from farm.tasks.known_tasks import CHECKS, TaskEvidence, evidence_of, keep_evidence, keep_text, kept_in
from workers.cli.local_rollout import ActingPolicy, SolutionPolicy, local_archive, now, repeated, score_job
from workers.config import SandboxConfig, own_config
from workers.handlers.harbor.sandbox_specs import verifier_sandbox
from workers.plugins.interfaces import ExecResult, Score
from workers.sandboxes.images.content_store import digest
from workers.sandboxes.images.image import image
from workers.sandboxes.launch_plan import start_build
from workers.stages.stage_job import Problem, SandboxSource, StageJob, resolve, resolve_problem
from workers.stages.task_archives import archive_folder

_LEAST_DEPTH = 4
"""Minimum depth of folders in a footprint: /usr/lib/ would be nearly all of an image."""
_N_SHOWN = 5
_N_LINES = 8
_PYTHON = re.compile(rb"python|pytest|\buvx?\b")
_MAX_READ = 1_000_000
_SHOWN = 300
_DISTRIBUTION = "rollout-farm"
_OF_NODE = ("build_network", "build_env", "build_files", "image_builder", "sandbox_user", "sandbox_ids", "layer_mb")
"""Settings that affect builds, runs and scores of tasks."""


def check_key(job: StageJob, kind: str, specs: Sequence[SandboxSpec]) -> str:
    """Return the digest of all that affects a check, in addition to the task's files. ImageError, SandboxError. Blocks.

    `kind` is that of its sandboxes; missing images are built.
    """
    batch = [
        job.limits.model_dump(mode="json"),
        job.batch.reward,
        job.batch.network,
        job.batch.verification,
        dict(job.batch.secrets),
    ]
    known = settings()
    node = [os.uname(), sys.version, *(getattr(known, name) for name in _OF_NODE)]
    config = SandboxConfig.of(known)
    made = partial(image, config, start=partial(start_build, config))
    images = [made(each.image, each.image_values, fallback=each.fallback_image).key(config) for each in specs]
    return digest("check", _code(), batch, kind, node, [each.model_dump(mode="json") for each in specs], images)


@cache
def _code() -> str:
    """Return the digest of the farm's version and of its files, which change in a checkout without the version."""
    folders = [Path(str(package.__file__)).parent for package in (farm, workers)]
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.suffix in (".py", ".sh")]
    stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return digest(version(_DISTRIBUTION), stamps)


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The parts of a batch that a check needs, and the number of concurrent tasks."""

    sandbox: str = "auto"
    network: NetworkRule = "refuse"
    verification: VerificationRule = "guarded"
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    reward: str = ""
    limits: Limits = field(default_factory=Limits)
    n_parallel: int = 2
    again: bool = False
    """True to repeat checks with a known result."""

    def job(self, data_source: str, fields: Mapping[str, Any], archive: str = "") -> StageJob:
        """Return the job of a rollout that runs once."""
        return StageJob(
            rollout_id=f"check-{uuid4().hex[:12]}.0.0",
            attempt=1,
            sample_index=0,
            data_source=data_source,
            fields=fields,
            batch=BatchSettings(
                limits=self.limits,
                reward=self.reward,
                network=self.network,
                verification=self.verification,
                secrets=dict(self.secrets),
            ),
            sandbox_kind=self.sandbox,
            archive=archive,
        )


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """The scores of one task: of its solution and of an untouched sandbox; None if there is none, and why."""

    name: str
    solved: float | None = None
    untouched: float | None = None
    problem: str = ""
    evidence: TaskEvidence = field(default_factory=TaskEvidence)
    """The facts stored for batches of this task."""
    rewards: Mapping[str, float] = field(default_factory=dict, compare=False)
    """The rewards of the solution by name."""
    test_output: str = field(default="", compare=False)
    """The last lines of the tests' output in a run with a wrong score."""
    image: str = field(default="", compare=False)
    """The images that were built from Dockerfiles because the named ones could not be pulled, and why."""
    log: str = field(default="", compare=False)
    """The file with the complete output of both runs; empty if nothing was scored."""
    checked_at: str = field(default="", compare=False)
    """Instant of the scores in UTC, ISO 8601; empty if nothing was scored."""
    known: bool = field(default=False, compare=False)
    """True if an earlier check stored the result."""

    @property
    def sound(self) -> bool:
        """True if the solution scores 1 and an untouched sandbox 0 or less."""
        return not self.problem and self.solved is not None and self.solved >= 1.0 and (self.untouched or 0.0) <= 0.0


_stored = TypeAdapter(TaskCheck)


@dataclass(frozen=True, slots=True)
class SolutionRun:
    """The score of a task with its own solution, and the output of the solution's scripts, one per step."""

    score: Score
    results: Sequence[ExecResult]

    @property
    def failure(self) -> str:
        """The output of the first failed script, after a semicolon; empty if none failed."""
        for result in self.results:
            if result.code != 0:
                end = "timed out" if result.timed_out else f"ended with {result.code}"
                return f"; it {end}: {_text(result.stderr or result.stdout)[-_SHOWN:]}"
        return ""


async def checked(paths: Sequence[Path], options: CheckOptions, tell: Callable[[TaskCheck], None]) -> list[TaskCheck]:
    """Check the tasks of these folders concurrently; `tell` is called with each result."""
    room = asyncio.Semaphore(options.n_parallel)

    async def one(path: Path) -> TaskCheck:
        async with room:
            check = await _checked(path, options)
        tell(check)
        return check

    return list(await asyncio.gather(*map(one, paths)))


async def _checked(path: Path, options: CheckOptions) -> TaskCheck:
    name, archive = path.name, ""
    try:
        with task_folder(path) as task:
            name = task.name
            if reasons := unsupported(needs_of(task.instance), None, options.network):
                return TaskCheck(name, problem=f"it asks for {'; '.join(reasons)}")
            archive = (await job_of(task, options)).archive
            stored = any(kept_in(settings().home, CHECKS).glob(f"{archive}.*.json"))
            if not options.again and stored and (known := await _known(task, options)):
                return known
            untouched = await repeated(partial(score_of, task, options))
            solution = await repeated(partial(solve, task, options))
            note = solution.failure
            if solution.score.value < 1.0 and options.verification == "guarded" and task.instance.restore != "nothing":
                solution, note = await _by_footprint(task, options, solution)
            if solution.score.value >= 1.0 and options.verification == "guarded" and _runs_python(task):
                await _try_safe_path(task, options, archive)
            check = await asyncio.to_thread(_result, task, archive, untouched, solution, note)
            await _keep(task, options, check)
            return check
    except FarmError as error:
        # Messages name the files in their unpacked location.
        text = str(error)
        if archive:
            text = text.replace(str(archive_folder(own_config().archives_folder, archive)), str(path))
        return TaskCheck(name, problem=text)


async def _known(task: TaskFolder, options: CheckOptions) -> TaskCheck | None:
    """Return the stored result of a task if nothing that affects it has changed, its evidence included."""
    archive, key = await repeated(partial(_key, task, options))
    try:
        check = _stored.validate_json((kept_in(settings().home, CHECKS) / f"{archive}.{key}.json").read_bytes())
    except (OSError, ValidationError):
        return None
    return replace(check, known=True) if check.evidence == evidence_of(settings().home, archive) else None


async def _keep(task: TaskFolder, options: CheckOptions, check: TaskCheck) -> None:
    archive, key = await repeated(partial(_key, task, options))
    await asyncio.to_thread(keep_text, settings().home, CHECKS, f"{archive}.{key}.json", json.dumps(asdict(check)))


async def _key(task: TaskFolder, options: CheckOptions) -> tuple[str, str]:
    """Return the digest of a task's files, and the digest of all else that affects its check. Raises FarmError."""
    job = await job_of(task, options)
    problem = await asyncio.to_thread(resolve_problem, job)
    source = resolve(problem).source
    assert source is not None
    folder = archive_folder(job.config.archives_folder, job.archive)
    own = [verifier_sandbox(task.instance, step, folder, job.batch.secrets) for step in task.instance.steps or (None,)]
    specs = list({each.model_dump_json(): each for each in (source.spec, *own)}.values())
    return job.archive, await asyncio.to_thread(check_key, problem.job, source.provider.kind, specs)


async def _by_footprint(task: TaskFolder, options: CheckOptions, run: SolutionRun) -> tuple[SolutionRun, str]:
    """Score a solution with all its changes; if it scores 1 then, store the paths that made the difference.

    Returns its run with these paths as the task's footprint; or its previous run, and a note, if they do not help.
    """
    as_authors = await repeated(partial(solve, task, replace(options, verification="as_authors")))
    if as_authors.score.value < 1.0:
        return run, run.failure
    archive = (await job_of(task, options)).archive
    known = evidence_of(settings().home, archive)
    changed = tuple(sorted({*known.footprint, *run.score.details.get("restored", ())}))
    if changed and not any(path.endswith("/") and path.count("/") < _LEAST_DEPTH for path in changed):
        await asyncio.to_thread(keep_evidence, settings().home, archive, replace(known, footprint=changed))
        by_footprint = await repeated(partial(solve, task, options))
        if by_footprint.score.value >= 1.0:
            return by_footprint, ""
        await asyncio.to_thread(keep_evidence, settings().home, archive, known)
    paths = ", ".join(changed[:_N_SHOWN]) or "files of pytest's configuration at /"
    return run, f"; with `verification=as_authors` it scores 1, as it changes {paths}"


async def _try_safe_path(task: TaskFolder, options: CheckOptions, archive: str) -> None:
    """Store whether the tests also score the solution 1 with PYTHONSAFEPATH=1, unless known."""
    known = evidence_of(settings().home, archive)
    if known.safe_path:
        return
    await asyncio.to_thread(keep_evidence, settings().home, archive, replace(known, safe_path=True))
    passes = False
    try:
        passes = (await repeated(partial(solve, task, options))).score.value >= 1.0
    finally:
        if not passes:
            await asyncio.to_thread(keep_evidence, settings().home, archive, known)


def _runs_python(task: TaskFolder) -> bool:
    folders = [task.path / "tests", *(task.path / "steps").glob("*/tests")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return any(_PYTHON.search(path.read_bytes()[:_MAX_READ]) for path in files)


def _result(task: TaskFolder, archive: str, untouched: Score, solution: SolutionRun, note: str) -> TaskCheck:
    solved = solution.score.value
    faults, test_output = [], ""
    if untouched.value > 0.0:
        faults.append(f"an untouched sandbox scores {untouched.value:g}, not 0")
        test_output = _output_end(untouched)
    if solved < 1.0:
        faults.insert(0, f"its solution scores {solved:g}, not 1{note}")
        test_output = _output_end(solution.score)
    log = keep_text(settings().home, CHECKS, f"{archive}.log", _log(task.name, untouched, solution))
    rewards = solution.score.rewards
    image = str(solution.score.details.get("image", ""))
    return TaskCheck(
        task.name,
        solved,
        untouched.value,
        "; ".join(faults),
        evidence_of(settings().home, archive),
        rewards,
        test_output,
        image,
        str(log),
        checked_at=now(),
    )


def _output_end(score: Score) -> str:
    text = str(score.details.get("output") or score.details.get("reason") or "")
    return "\n".join(text.splitlines()[-_N_LINES:])


def _log(name: str, untouched: Score, solution: SolutionRun) -> str:
    parts = [f"== {name}: its solution"]
    for result in solution.results:
        parts += [_text(result.stdout), _text(result.stderr), f"exit code: {result.code}"]
    for title, score in (("its tests after the solution", solution.score), ("its tests untouched", untouched)):
        details = {key: value for key, value in score.details.items() if key != "output"}
        parts += [f"== {name}: {title}", str(score.details.get("output", "")), f"rewards: {json.dumps(score.rewards)}"]
        parts.append(f"details: {json.dumps(details)}")
    return "".join(f"{part}\n" for part in parts if part)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").strip()


async def score_of(task: TaskFolder, options: CheckOptions) -> Score:
    """Score a task with an untouched sandbox. Raises FarmError."""
    job = await job_of(task, options)
    return await score_job(job, lambda _, source: ActingPolicy(job.sandbox_id, source))


async def solve(task: TaskFolder, options: CheckOptions) -> SolutionRun:
    """Score a task with its own solution. Raises FarmError."""
    job = await job_of(task, options)
    policies: list[SolutionPolicy] = []

    def solving(problem: Problem, source: SandboxSource | None) -> SolutionPolicy:
        folder = archive_folder(job.config.archives_folder, job.archive)
        policies.append(SolutionPolicy(job.sandbox_id, source, task.instance, folder, job.batch.secrets))
        return policies[-1]

    score = await score_job(job, solving)
    return SolutionRun(score, policies[-1].results)


async def job_of(task: TaskFolder, options: CheckOptions) -> StageJob:
    """Return the job of a task that runs once, with its archive unpacked on this node, as in a batch."""
    archive = await asyncio.to_thread(local_archive, task.path)
    request = task.request(archive, evidence_of(settings().home, archive))
    return options.job(DATA_SOURCE, request["fields"], request["archive"])
