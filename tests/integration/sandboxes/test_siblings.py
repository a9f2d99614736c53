"""Samples of one instance of a real handler: preparation for the first serves all, and none of it is used to score."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.problems import humaneval_problems, swe_problems
from farm.ids import eval_sandbox_id
from farm.records.request import BatchSettings, Instance
from farm.settings import settings
from testkit.scratch_folder import sandbox_config
from tests.conftest import absent
from tests.services.farms import farm_folder
from workers.plugins.interfaces import Sandbox
from workers.plugins.registry import sandbox as provider
from workers.sandboxes.lifecycle import layers
from workers.stages import stage_functions
from workers.stages.stage_job import StageJob, resolve, resolve_problem

(FIX,) = swe_problems(1)
(PROGRAM,) = humaneval_problems(1)


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if missing := provider("namespace").missing():
        absent(missing)
    with farm_folder() as folder:
        monkeypatch.setenv("FARM_SCRATCH", str(folder / "scratch"))
        settings.cache_clear()
        yield folder / "scratch"
        layers.sweep(sandbox_config(), 0.0)
        assert not [*sandbox_config().sandboxes_folder.iterdir(), *_layers()]
        monkeypatch.undo()
        settings.cache_clear()


def _layers() -> list[Path]:
    parent = sandbox_config().layers_folder
    return list(parent.iterdir()) if parent.is_dir() else []


def samples(instance: Instance, n: int) -> list[StageJob]:
    return [
        StageJob(
            rollout_id=f"batch.0.{index}",
            attempt=1,
            sample_index=index,
            data_source=instance.data_source,
            fields=instance.fields,
            batch=BatchSettings(n_samples=n),
            sandbox_kind="namespace",
        )
        for index in range(n)
    ]


async def sh(sandbox: Sandbox, script: str) -> str:
    result = await sandbox.exec(["bash", "-c", script], timeout_s=60)
    assert result.code == 0, result
    return result.stdout.decode()


async def open_sandbox(job: StageJob) -> Sandbox:
    place = resolve(resolve_problem(job)).source
    assert place
    return await place.provider.attach(job.sandbox_id, place.spec)


def test_git_tree_is_committed_once_for_all_samples() -> None:
    jobs = samples(FIX, 3)

    async def main() -> None:
        await asyncio.gather(*map(stage_functions.init, map(resolve_problem, jobs)))
        assert len(_layers()) == 1
        one, *others = [await open_sandbox(job) for job in jobs]
        when = {await sh(each, "git log --format=%H%ct") for each in (one, *others)}
        assert len(when) == 1, "all have the same commit"
        assert (
            await sh(
                one, "git status --short; rm -rf .git/objects setup.py; echo x > mine; git log 2>&1 || echo broken"
            )
            != ""
        )
        for other in others:
            assert await sh(other, "git status --short; git fsck 2>&1 | grep -v notice; test ! -e mine") == ""
        for job in jobs:
            await stage_functions.discard(resolve_problem(job))

    asyncio.run(main())


def test_evaluation_sandbox_is_not_prepared() -> None:
    (job, _) = samples(FIX, 2)

    async def main() -> None:
        await stage_functions.init(resolve_problem(job))
        place = resolve(resolve_problem(job)).source
        assert place
        fresh = await place.provider.start(eval_sandbox_id(job.sandbox_id), place.spec)
        assert await sh(fresh, "ls -A | grep -cx .git || true") == "0\n"
        await fresh.stop()
        await stage_functions.discard(resolve_problem(job))

    asyncio.run(main())


@pytest.mark.parametrize(("instance", "n"), [(FIX, 1), (PROGRAM, 4)], ids=["a lone sample", "nothing to prepare"])
def test_layer_is_kept_only_if_it_saves_work(instance: Instance, n: int) -> None:
    jobs = samples(instance, n)

    async def main() -> None:
        await asyncio.gather(*map(stage_functions.init, map(resolve_problem, jobs)))
        assert not _layers()
        for job in jobs:
            await stage_functions.discard(resolve_problem(job))

    asyncio.run(main())
