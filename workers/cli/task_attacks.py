"""Attacks on tasks: each is played untouched, by its solution and by all attacks that are known for its data source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from farm.errors import FarmError
from workers.attacks.attack import NO_WORK, UNTOUCHED, Attack, AttackPlan
from workers.attacks.plans import SOLUTION, plan_of
from workers.cli.acting_policy import AttackPolicy
from workers.cli.attack_reports import AttackReport, AttackScore, keep, kept, now
from workers.cli.local_rollout import repeated, score_job
from workers.cli.task_checks import CheckOptions
from workers.sandboxes.images.content_store import digest
from workers.stage_job import StageJob, resolve_problem

_FULL = 1.0


@dataclass(frozen=True, slots=True)
class AttackOptions:
    """Options of attacks: `n_runs` of the solution and of no work; `again` scores tasks with a kept report, too."""

    check: CheckOptions
    n_runs: int = 3
    again: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """One task that is attacked: a folder of Harbor, or else a row of a data source."""

    name: str
    data_source: str
    fields: Mapping[str, Any] | None = None
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class _Opened:
    """A task that is ready to be scored: its digest, its attacks, and what scores one, or its solution's script."""

    digest: str
    plan: AttackPlan
    score: Callable[[Attack], Awaitable[float]]
    solve: Callable[[], Awaitable[tuple[float, str]]] | None = None


async def attacked(
    targets: Sequence[Target], options: AttackOptions, tell: Callable[[AttackReport], None]
) -> list[AttackReport]:
    """Attack tasks, so many submissions at a time; `tell` is called with each report. Reports are kept."""
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
    async with _opened(target, options.check) as task:
        known = None if options.again else kept(task.digest)
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
            value, note = await task.solve()
            return value

        untouched = await one(UNTOUCHED.name, UNTOUCHED.kind, options.n_runs, partial(task.score, UNTOUCHED))
        if untouched.error:
            return AttackReport(target.name, target.data_source, task.digest, problem=untouched.error)
        solution = None
        if task.solve is not None or task.plan.solution is not None:
            solution = await one(SOLUTION, SOLUTION, options.n_runs, solving)
        attacks: list[AttackScore] = []
        for idle in (True, False):
            # where doing nothing has the full reward, no attack can show more
            if max(each.best for each in (untouched, *attacks)) < _FULL:
                chosen = [each for each in task.plan.attacks if (each.kind == NO_WORK) == idle]
                attacks += await asyncio.gather(
                    *(one(each.name, each.kind, 1, partial(task.score, each)) for each in chosen)
                )
        problem = "" if solution is None or not solution.error else f"its solution has no score: {solution.error}"
        report = AttackReport(
            target.name,
            target.data_source,
            task.digest,
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
async def _opened(target: Target, options: CheckOptions) -> AsyncIterator[_Opened]:
    """Open a task. Raises FarmError if it cannot be played on this machine."""
    assert target.fields is not None
    job = options.job(target.data_source, target.fields)
    problem = await asyncio.to_thread(resolve_problem, job)
    plan = plan_of(target.data_source, target.fields, problem.instance)

    async def score(attack: Attack) -> float:
        return await _scored(options.job(target.data_source, target.fields or {}), attack)

    yield _Opened(_digest(job, plan), plan, score)


async def _scored(job: StageJob, attack: Attack) -> float:
    return (await score_job(job, lambda _, source: AttackPolicy(job.sandbox_id, source, attack))).value


def _digest(job: StageJob, plan: AttackPlan) -> str:
    """Return the digest of a task and of what it is attacked with."""
    attacks = [asdict(each) for each in (*plan.attacks, plan.solution) if each is not None]
    return digest(job.data_source, dict(job.fields), job.archive, job.reward, job.network, attacks)
