"""Right patches in unusual forms score 1, in our own format and as rows of SWE-bench.

`make test` runs every eighth, `make soak` all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from tests.acceptance.scores.honest_patches import PATCHES
from tests.conftest import absent
from tests.integration.scores import issue_project, swe_project
from tests.services.soak import at_length
from workers.plugins.interfaces import Score
from workers.plugins.registry import sandbox as provider

pytestmark = [pytest.mark.timeout(1800), pytest.mark.soak]
CHOSEN = at_length({name: PATCHES[name] for name in [*PATCHES][::8]}, PATCHES)
N_HONEST = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if missing := provider("namespace").missing():
        absent(missing)
    return tmp_path


async def all_scores(
    score: Callable[[bytes], Awaitable[Score]], patches: Mapping[str, bytes]
) -> dict[str, Score | BaseException]:
    results = await asyncio.gather(*map(score, patches.values()), return_exceptions=True)
    return {
        name: result for name, result in zip(patches, results, strict=True) if getattr(result, "value", None) != 1.0
    }


def test_right_patches_score_one(folder: Path) -> None:
    project = swe_project.Project(folder)

    async def main() -> dict[str, Score | BaseException]:
        pool = swe_project.Pool(2)
        patches = {name: project.patch(edit) for name, edit in CHOSEN.items()}
        try:
            return await all_scores(
                lambda patch: swe_project.score(project.plan(), patch, pool.fresh(), 300.0), patches
            )
        finally:
            await pool.close()

    assert asyncio.run(main()) == {}


def test_right_patches_of_swe_bench_rows_score_one(folder: Path) -> None:
    project = swe_project.Project(folder)
    row = issue_project.row_of(project, folder)

    async def main() -> dict[str, Score | BaseException]:
        shared = issue_project.SharedSandboxes(2)
        patches = {name: project.patch(edit) for name, edit in CHOSEN.items()}
        try:
            return await all_scores(lambda patch: issue_project.score(row, patch, shared.fresh(), 300.0), patches)
        finally:
            await shared.close()

    assert asyncio.run(main()) == {}


def test_corpus_has_enough_patches() -> None:
    assert len(PATCHES) >= N_HONEST
