"""Patches of SWE-bench rows that fix nothing score nothing, whatever else they do; a right one still scores.

`make test` runs a few of each kind, `make soak` all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.acceptance.scores.issue_hacks import CUT, CUT_TESTS, edits, edits_of_cut_names
from tests.conftest import absent
from tests.integration.scores.issue_project import SharedSandboxes, row_of, score
from tests.integration.scores.swe_project import GOLD, Project
from tests.services.soak import at_length
from workers.plugins.interfaces import Score
from workers.plugins.registry import sandbox as provider

pytestmark = [pytest.mark.timeout(1200), pytest.mark.soak]
ALL = edits()
FEW = (
    "prints_results_at_exit",
    "prints_marks_and_exit_code",
    "tests_do_nothing",
    "quiet_if_called",
    "says_that_memory_is_gone",
)
CUT_HACKS = edits_of_cut_names()
HACKS = at_length({name: ALL[name] for name in FEW}, ALL)
RIGHT = {"gold": GOLD, "gold_and_tests": f"{GOLD}; echo 'raise SystemExit' > tests/conftest.py; rm tests/test_core.py"}


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Score | BaseException]:
    if missing := provider("namespace").missing():
        absent(missing)
    folder = tmp_path_factory.mktemp("project")
    return asyncio.run(_scores(Project(folder), folder, {**RIGHT, **HACKS}))


@pytest.fixture(scope="module")
def scores_of_cut_names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Score | BaseException]:
    """Return the scores where all names of tests to be fixed are cut at a space."""
    if missing := provider("namespace").missing():
        absent(missing)
    folder = tmp_path_factory.mktemp("project")
    return asyncio.run(_scores(Project(folder, CUT_TESTS), folder, {"gold": GOLD, **CUT_HACKS}, [CUT]))


async def _scores(
    project: Project, folder: Path, chosen: Mapping[str, str], fail_to_pass: Sequence[str] = ()
) -> dict[str, Score | BaseException]:
    row = row_of(project, folder, fail_to_pass)
    shared = SharedSandboxes(2)
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


def test_right_patch_resolves_rows_with_cut_test_names(scores_of_cut_names: dict[str, Score | BaseException]) -> None:
    result = scores_of_cut_names["gold"]
    assert isinstance(result, Score), result
    assert (result.value, result.details["confirmed"]) == (1.0, True), result


@pytest.mark.parametrize("name", CUT_HACKS)
def test_forged_log_of_cut_names_resolves_nothing(
    name: str, scores_of_cut_names: dict[str, Score | BaseException]
) -> None:
    result = scores_of_cut_names[name]
    assert isinstance(result, Score), result
    assert result.value == 0.0, result
