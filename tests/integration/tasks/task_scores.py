"""Scores of many small Harbor tasks: several solutions run at a time, in a farm with their base images."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from farm.tasks.harbor_folder import task_folder
from testkit.scratch_folder import sandbox_config
from tests.conftest import absent
from tests.contract.sandboxes.sandbox_kinds import farm_in
from tests.integration.tasks.harbor_hacks import write_task
from tests.services.farms import farm_folder
from tests.services.task_images import task_base
from workers.cli.task_checks import CheckOptions, solve
from workers.plugins.interfaces import Score
from workers.plugins.registry import sandbox as provider
from workers.sandboxes.images.image import set_alias
from workers.sandboxes.remove_tree import remove

Scores = Mapping[str, Score | BaseException]


@contextmanager
def farm_with_bases(base: Path) -> Iterator[Path]:
    """Yield the folder of a farm, set for this process, in which the samples' base images exist by name.

    `base` is an empty folder that becomes their root file system.
    """
    if missing := provider("namespace").missing():
        absent(missing)
    base.chmod(0o755)
    with farm_folder() as folder, farm_in(folder):
        task_base(base)
        for name in ("debian:bookworm-slim", "python:3.11-slim"):
            set_alias(sandbox_config(), name, str(base))
        yield folder
        remove(folder)


def task_scores(top: Path, tasks: Mapping[str, Sequence[str]], options: CheckOptions) -> Scores:
    """Return the score of each task by name, or its error; a task has the arguments of `write_task` after `folder`."""
    room = asyncio.Semaphore(options.n_parallel)

    async def score(name: str) -> Score:
        async with room:
            with task_folder(write_task(top / name.replace(" ", "-"), *tasks[name])) as task:
                return (await solve(task, options)).score

    async def all_scores() -> list[Score | BaseException]:
        return await asyncio.gather(*map(score, tasks), return_exceptions=True)

    return dict(zip(tasks, asyncio.run(all_scores()), strict=True))


def values(scores: Scores) -> dict[str, float | BaseException]:
    """Return the rewards instead of the scores."""
    return {name: score.value if isinstance(score, Score) else score for name, score in scores.items()}
