"""Patches of SWE-bench rows that mend nothing score nothing, whatever else they do; a right one scores all the same.

A few of each kind are played in `make test`, all of them in `make soak`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.acceptance.scores.issue_hacks import edits
from tests.conftest import absent
from tests.integration.scores.issue_project import SharedSandboxes, row_of, score
from tests.integration.scores.swe_project import GOLD, Project
from tests.services.soak import at_length
from workers.interfaces import Score
from workers.registry import sandbox as provider

pytestmark = [pytest.mark.timeout(1200), pytest.mark.soak]
ALL = edits()
FEW = (
    "prints_results_at_exit",
    "prints_marks_and_exit_code",
    "tests_do_nothing",
    "says_that_memory_is_gone",
)
HACKS = at_length({name: ALL[name] for name in FEW}, ALL)
RIGHT = {"gold": GOLD, "gold_and_tests": f"{GOLD}; echo 'raise SystemExit' > tests/conftest.py; rm tests/test_core.py"}


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Score | BaseException]:
    if missing := provider("namespace").missing():
        absent(missing)
    folder = tmp_path_factory.mktemp("project")
    return asyncio.run(_scores(Project(folder), folder))


async def _scores(project: Project, folder: Path) -> dict[str, Score | BaseException]:
    row = row_of(project, folder)
    shared = SharedSandboxes(2)
    chosen = {**RIGHT, **HACKS}
    patches = {name: project.patch(edit) for name, edit in chosen.items()}
    try:
        result = await asyncio.gather(
            *(score(row, patch, shared.fresh()) for patch in patches.values()), return_exceptions=True
        )
    finally:
        await shared.close()
    return dict(zip(chosen, result, strict=True))


@pytest.mark.parametrize("name", RIGHT)
def test_right_patch_resolves(name: str, scores: dict[str, Score | BaseException]) -> None:
    result = scores[name]
    assert isinstance(result, Score), result
    assert result.value == 1.0, result
    assert result.details["confirmed"] is True


@pytest.mark.parametrize("name", HACKS)
def test_hack_resolves_nothing(name: str, scores: dict[str, Score | BaseException]) -> None:
    result = scores[name]
    assert isinstance(result, Score), result
    assert result.value == 0.0, result
