"""Patches of compiled code: right ones score, and actions of others during the build have no effect on the score.

`make test LONG=1` runs a few of the latter, `make soak` all of them.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from farm.records.request import SandboxSpec
from tests.acceptance.scores.compiled_project import FEW, HACKS, RIGHT, compiled_row
from tests.conftest import absent
from tests.integration.scores.issue_project import score
from tests.integration.scores.swe_project import SPEC
from tests.services.soak import at_length
from workers.plugins.interfaces import Sandbox, Score
from workers.plugins.registry import sandbox as provider

pytestmark = [pytest.mark.timeout(1200), pytest.mark.soak]
SELECTED = at_length({name: HACKS[name] for name in FEW}, HACKS)
_TIMEOUT_S = 150.0


@asynccontextmanager
async def _fresh(spec: SandboxSpec | None = None, *, layer: bool = False) -> AsyncIterator[Sandbox]:
    own = SPEC.model_copy(update={"workdir": "/testbed"})
    sandbox = await provider("namespace").start(f"test-{uuid.uuid4().hex[:12]}", own)
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def _scores(folder: Path, edits: Mapping[str, str]) -> dict[str, Score | BaseException]:
    project, row = compiled_row(folder)
    patches = {name: project.patch(edit) for name, edit in edits.items()}
    few = asyncio.Semaphore(3)

    async def scored(patch: bytes) -> Score:
        async with few:
            return await score(row, patch, _fresh, _TIMEOUT_S)

    results = await asyncio.gather(*map(scored, patches.values()), return_exceptions=True)
    return dict(zip(edits, results, strict=True))


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Score | BaseException]:
    if missing := provider("namespace").missing():
        absent(missing)
    return asyncio.run(_scores(tmp_path_factory.mktemp("project"), {**RIGHT, **SELECTED}))


@pytest.mark.parametrize("name", RIGHT)
def test_right_patch_resolves(name: str, scores: dict[str, Score | BaseException]) -> None:
    result = scores[name]
    assert isinstance(result, Score), result
    assert (result.value, result.details.get("confirmed")) == (1.0, True), result


@pytest.mark.parametrize("name", SELECTED)
def test_attack_during_the_build_scores_zero(name: str, scores: dict[str, Score | BaseException]) -> None:
    result = scores[name]
    assert isinstance(result, Score), result
    assert result.value == 0.0, result
