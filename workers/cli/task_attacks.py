"""Attacks on tasks: each is run untouched, with its solution, and with all known attacks; their reports are stored."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import TypeAdapter, ValidationError

from farm.cli.request_files import read_problems, read_rows_as
from farm.errors import FarmError, InvalidRequest
from farm.records.request import Instance
from farm.records.task_needs import unsupported
from farm.rows.loaded_rows import COLUMNS
from farm.rows.row_forms import FORMS
from farm.settings import settings
from farm.tasks.harbor_folder import TaskFolder, task_folder, task_paths
from farm.tasks.harbor_instance import DATA_SOURCE, needs_of
from farm.tasks.known_tasks import ATTACKS, keep_text, kept_in
from workers.attacks.attack import NO_WORK, SKIPPED_TESTS, UNTOUCHED, Attack, AttackPlan
from workers.attacks.harbor_attacks import harbor_attacks
from workers.attacks.plans import SOLUTION, plan_of
from workers.cli.local_rollout import AttackPolicy, now, repeated, score_job
from workers.cli.task_checks import CheckOptions, SolutionRun, job_of, solve
from workers.sandboxes.images.content_store import digest
from workers.stages.stage_job import StageJob, resolve_problem

_FULL = 1.0


@dataclass(frozen=True, slots=True)
class AttackScore:
    """The scores of one submission in its runs, highest last; `error` says why a run had none."""

    name: str
    kind: str
    scores: tuple[float, ...] = ()
    error: str = ""

    @property
    def best(self) -> float:
        """Return the highest score, 0 without one."""
        return max(self.scores, default=0.0)


@dataclass(frozen=True, slots=True)
class AttackReport:
    """The attacks on one task. `solution` is None if the task has none; `problem` says why it could not be run."""

    name: str
    data_source: str
    digest: str = ""
    """The digest of the task."""
    plan: str = ""
    """The digest of its attacks, and of its scoring."""
    solution: AttackScore | None = None
    untouched: AttackScore | None = None
    attacks: tuple[AttackScore, ...] = ()
    note: str = ""
    """The output of a failed solution."""
    problem: str = ""
    scored_at: str = ""
    """Instant of the scores in UTC, ISO 8601."""
    known: bool = field(default=False, compare=False)
    """True if an earlier run stored the report."""

    @property
    def findings(self) -> Mapping[str, str]:
        """Return the task's faults: names of `known_tasks.FINDINGS`, each with the scores that show it."""
        none = AttackScore("untouched", NO_WORK)
        untouched = self.untouched or none
        idle = [untouched, *(each for each in self.attacks if each.kind == NO_WORK)]
        floor = max(each.best for each in idle)
        faults = {
            "vacuous": _shown([each for each in idle if each.best > 0.0]),
            "flaky": _shown([each for each in (untouched, self.solution) if each and len(set(each.scores)) > 1]),
            "skippable": _shown([each for each in self._scored(floor) if each.kind == SKIPPED_TESTS]),
            "hackable": _shown([each for each in self._scored(floor) if each.kind != SKIPPED_TESTS]),
        }
        if self.solution is not None and self.solution.scores and self.solution.best < 1.0:
            faults["unsolvable"] = f"its solution scores {self.solution.best:g}, not 1{self.note}"
        return {name: text for name, text in faults.items() if text}

    def _scored(self, floor: float) -> Sequence[AttackScore]:
        return [each for each in self.attacks if each.kind != NO_WORK and each.best > max(floor, 0.0)]

    @property
    def n_unscored(self) -> int:
        """Return the number of attacks without a score."""
        return sum(bool(each.error) for each in self.attacks)


_stored = TypeAdapter(AttackReport)


def _shown(scored: Sequence[AttackScore]) -> str:
    """Return submissions by class: `early-exit: exit-at-once 1; echo: echo 0.5`."""
    kinds: dict[str, list[str]] = {}
    for each in scored:
        values = "/".join(f"{score:g}" for score in each.scores)
        kinds.setdefault(each.kind, []).append(f"{each.name} {values}")
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items())


def kept(digest: str, plan: str) -> AttackReport | None:
    """Return a task's stored report for these attacks; None if there is no readable one."""
    try:
        stored = _stored.validate_json((kept_in(settings().home, ATTACKS) / f"{digest}.{plan}.json").read_bytes())
    except (OSError, ValidationError):
        return None
    return replace(stored, known=True)


def keep(report: AttackReport) -> None:
    """Store a report under the digests of its task and its attacks, below FARM_HOME. Raises NotAllowed, OSError."""
    fields = {**asdict(report), "findings": report.findings}
    del fields["known"]
    keep_text(settings().home, ATTACKS, f"{report.digest}.{report.plan}.json", json.dumps(fields))


@dataclass(frozen=True, slots=True)
class AttackOptions:
    """Options of attacks: `n_runs` of the solution and of no work; `again` repeats tasks with a stored report."""

    check: CheckOptions
    n_runs: int = 3
    again: bool = False
    kinds: Sequence[str] = ()
    """The classes of attacks in addition to no work; all if empty."""


@dataclass(frozen=True, slots=True)
class Target:
    """One task to attack: a Harbor folder, or a row of a data source."""

    name: str
    data_source: str
    fields: Mapping[str, Any] | None = None
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class _Opened:
    """A task ready for scoring: its job, its attacks, and the scoring functions of attacks and of its solution."""

    job: StageJob
    plan: AttackPlan
    score: Callable[[Attack], Awaitable[float]]
    solve: Callable[[], Awaitable[SolutionRun]] | None = None


async def attacked(
    targets: Sequence[Target], options: AttackOptions, tell: Callable[[AttackReport], None]
) -> list[AttackReport]:
    """Attack tasks, a number of submissions at a time; `tell` is called with each report. Reports are stored."""
    room = asyncio.Semaphore(options.check.n_parallel)

    async def one(target: Target) -> AttackReport:
        try:
            report = await _attacked(target, options, room)
        except FarmError as error:
            report = AttackReport(target.name, target.data_source, problem=str(error))
        tell(report)
        return report

    return list(await asyncio.gather(*map(one, targets)))


async def _attacked(target: Target, options: AttackOptions, room: asyncio.Semaphore) -> AttackReport:
    async with _opened(target, options) as task:
        digests = _digests(task.job, task.plan)
        known = None if options.again else kept(*digests)
        if known is not None and known.untouched and len(known.untouched.scores) >= options.n_runs:
            return known
        note = ""

        async def one(name: str, kind: str, n_runs: int, scoring: Callable[[], Awaitable[float]]) -> AttackScore:
            scores: list[float] = []
            for _ in range(n_runs):
                async with room:
                    try:
                        scores.append(await repeated(scoring))
                    except FarmError as error:
                        return AttackScore(name, kind, tuple(scores), str(error))
            return AttackScore(name, kind, tuple(scores))

        async def solving() -> float:
            nonlocal note
            if task.solve is None:
                assert task.plan.solution is not None
                return await task.score(task.plan.solution)
            run = await task.solve()
            note = run.failure
            return run.score.value

        untouched = await one(UNTOUCHED.name, UNTOUCHED.kind, options.n_runs, partial(task.score, UNTOUCHED))
        if untouched.error:
            return AttackReport(target.name, target.data_source, *digests, problem=untouched.error)
        solution = None
        if task.solve is not None or task.plan.solution is not None:
            solution = await one(SOLUTION, SOLUTION, options.n_runs, solving)
        attacks: list[AttackScore] = []
        for idle in (True, False):
            # If doing nothing has the full reward, no attack can show more.
            if max(each.best for each in (untouched, *attacks)) < _FULL:
                chosen = [each for each in task.plan.attacks if (each.kind == NO_WORK) == idle]
                attacks += await asyncio.gather(
                    *(one(each.name, each.kind, 1, partial(task.score, each)) for each in chosen)
                )
        problem = (
            "" if solution is None or not solution.error else f"a run of its solution has no score: {solution.error}"
        )
        report = AttackReport(
            target.name,
            target.data_source,
            *digests,
            solution,
            untouched,
            tuple(attacks),
            note if solution is not None and solution.best < _FULL else "",
            problem,
            now(),
        )
        if not problem:
            await asyncio.to_thread(keep, report)
        return report


@asynccontextmanager
async def _opened(target: Target, options: AttackOptions) -> AsyncIterator[_Opened]:
    """Open a task. Raises FarmError if it cannot be run on this machine."""
    if target.folder is not None:
        with task_folder(target.folder) as task:
            yield await _harbor_task(task, options)
        return
    fields = target.fields or {}
    job = options.check.job(target.data_source, fields)
    problem = await asyncio.to_thread(resolve_problem, job)
    plan = _chosen(plan_of(target.data_source, fields, problem.handler.instance), options)

    async def score(attack: Attack) -> float:
        return await _scored(options.check.job(target.data_source, fields), attack)

    yield _Opened(job, plan, score)


async def _harbor_task(task: TaskFolder, options: AttackOptions) -> _Opened:
    if reasons := unsupported(needs_of(task.instance), None, options.check.network):
        raise InvalidRequest(f"it asks for {'; '.join(reasons)}")
    attacks = await asyncio.to_thread(harbor_attacks, task.path, task.instance.instructions)
    plan = _chosen(AttackPlan(attacks), options)

    async def score(attack: Attack) -> float:
        with _with_tests(task, attack.test_files) as attacked_task:
            return await _scored(await job_of(attacked_task, options.check), attack)

    solved = partial(solve, task, options.check)
    return _Opened(await job_of(task, options.check), plan, score, solved)


@contextmanager
def _with_tests(task: TaskFolder, files: Mapping[str, str]) -> Iterator[TaskFolder]:
    """Yield the task itself; with `files`, a copy in which they are appended to the files of its tests."""
    if not files:
        yield task
        return
    with TemporaryDirectory(prefix="farm-attack-") as parent:
        copied = Path(parent) / "task"
        shutil.copytree(task.path, copied, symlinks=True)
        for folder in (copied / "tests", *copied.glob("steps/*/tests")):
            for name, text in files.items():
                if folder.is_dir():
                    with (folder / name).open("a") as file:
                        file.write(text)
        yield replace(task, path=copied)


def _chosen(plan: AttackPlan, options: AttackOptions) -> AttackPlan:
    attacks = [each for each in plan.attacks if not options.kinds or each.kind in (NO_WORK, *options.kinds)]
    return replace(plan, attacks=attacks)


async def _scored(job: StageJob, attack: Attack) -> float:
    return (await score_job(job, lambda _, source: AttackPolicy(job.sandbox_id, source, attack))).value


def _digests(job: StageJob, plan: AttackPlan) -> tuple[str, str]:
    """Return the digest of a task, and the digest of its attacks and its scoring."""
    task = Instance(data_source=job.data_source, fields=dict(job.fields), archive=job.archive)
    attacks = [asdict(each) for each in (*plan.attacks, plan.solution) if each is not None]
    return task.digest, digest(job.batch.reward, job.batch.network, job.batch.verification, attacks)


def targets_of(path: Path, form: str) -> list[Target]:
    """Return the tasks of a path; `form` is a form of rows or a data source, empty if the rows name it themselves.

    Raises FarmError.
    """
    if path.is_dir():
        if form not in ("", DATA_SOURCE):
            raise InvalidRequest(f"{path} is a folder, whose tasks are always `{DATA_SOURCE}`: leave --as out")
        return [Target(each.name, DATA_SOURCE, folder=each) for each in task_paths(path)]
    if not form:
        file = read_problems(path)
    elif form in FORMS:
        file, _ = read_rows_as(path, form, (), "", None)
    else:
        file, _ = read_rows_as(path, COLUMNS, (), form, None)
    targets = []
    for number, each in zip(file.lines, file.instances, strict=True):
        if not isinstance(each.get("data_source"), str) or not isinstance(each.get("fields"), dict):
            reason = "it has no `data_source` and `fields`: give --as FORM for rows of a data set"
            raise InvalidRequest(reason, field=f"{path}:{number}")
        targets.append(
            Target(str(each.get("instance_id") or f"{path.name}:{number}"), each["data_source"], each["fields"])
        )
    return targets
