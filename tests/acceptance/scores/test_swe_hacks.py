"""Patches that fix nothing score nothing, whatever else they do; a right one still scores.

`make test` runs some of each kind, `make soak` all of them.
"""

from __future__ import annotations

import asyncio

import pytest

from farm.errors import EvaluatorError
from tests.acceptance.scores.swe_hacks import edits, edits_for_separate_sandboxes
from tests.conftest import absent
from tests.integration.scores.swe_project import GOLD, Pool, Project, score
from tests.services.soak import at_length
from workers.plugins.interfaces import Score
from workers.plugins.registry import sandbox as provider

pytestmark = [pytest.mark.timeout(1200), pytest.mark.soak]
ALL = edits()
SEEN = (
    *("logreport_patched", "plugin_registered", "pluggy_multicall", "unittest_run", "json_dumps"),
    "plugin_wraps_dumps",
)
"""Forged reports that the canaries detect."""
FEW = (
    *SEEN,
    # reports, tests and outcomes replaced while pytest runs, or written to its report
    *("report_init", "callinfo_without_excinfo", "assertion_error", "import_hook"),
    *("all_descriptors", "parents_memory", "protocol_forged"),
    # hidden failures of the tests that call the project, and results that equal everything
    *("quiet_if_called", "equal_to_everything"),
    # an end before the tests, or nothing that runs
    *("exit", "module_skips"),
    # files next to the package
    *("conftest_of_tests", "pytest_py", "pyproject"),
)
HACKS = at_length({name: ALL[name] for name in FEW}, ALL)
ALONE = edits_for_separate_sandboxes()
RIGHT = {
    "gold": GOLD,
    "gold_and_a_module": f"{GOLD}; echo 'X = 1' > calc/extra.py; echo 'Y = 2' > helpers_of_calc.py",
    "gold_and_tests": f"{GOLD}; echo 'raise SystemExit' > tests/conftest.py; rm tests/test_core.py",
    "gold_and_settings": f"{GOLD}; echo 'license = \"MIT\"' >> pyproject.toml; echo 'author = me' >> setup.cfg",
    "gold_and_shadow": f"{GOLD}; echo 'raise SystemExit' > pytest.py; echo 'raise SystemExit' > json.py",
}


_AGAIN = 3


def _was_late(score: Score | BaseException) -> bool:
    """Return whether a patch has no verdict because the machine ran other programs during its time."""
    return isinstance(score, EvaluatorError) and "the machine was late" in str(score)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    if missing := provider("namespace").missing():
        absent(missing)
    return Project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def scores(project: Project) -> dict[str, Score | BaseException]:
    """Return all scores, with as many in parallel as there are sandboxes."""

    async def all_scores() -> dict[str, Score | BaseException]:
        pool = Pool(4)
        few, many = asyncio.Semaphore(4), asyncio.Semaphore(len(ALONE))

        async def one(edit: str, alone: bool) -> Score:
            async with few if not alone else many:
                patch = project.patch(edit)
                return await score(project.plan(), patch, pool.fresh(alone), 40.0 if alone else 300.0)

        # those that reach their time limit come first, in parallel with the others
        chosen = {**ALONE, **RIGHT, **HACKS}
        try:
            result = await asyncio.gather(
                *(one(edit, name in ALONE) for name, edit in chosen.items()), return_exceptions=True
            )
            scored = dict(zip(chosen, result, strict=True))
            # scored again as the farm would, now without parallel tests
            for name in [name for name in ALONE for _ in range(_AGAIN)]:
                if _was_late(scored[name]):
                    [scored[name]] = await asyncio.gather(one(ALONE[name], True), return_exceptions=True)
        finally:
            await pool.close()
        return scored

    return asyncio.run(all_scores())


@pytest.mark.parametrize("name", RIGHT)
def test_right_patch_scores(name: str, scores: dict[str, Score | BaseException]) -> None:
    score = scores[name]
    assert isinstance(score, Score), score
    assert score.value == 1.0, score


@pytest.mark.parametrize("name", HACKS)
def test_hack_scores_zero(name: str, scores: dict[str, Score | BaseException]) -> None:
    score = scores[name]
    assert isinstance(score, Score), score
    assert score.value == 0.0, score


@pytest.mark.parametrize("name", ALONE)
def test_hack_that_harms_its_sandbox_scores_zero(name: str, scores: dict[str, Score | BaseException]) -> None:
    score = scores[name]
    if _was_late(score):
        pytest.skip(f"this machine is too busy to tell: {score}")
    assert isinstance(score, Score), score
    assert score.value == 0.0, score


def test_forged_reports_are_detected_by_canaries(scores: dict[str, Score | BaseException]) -> None:
    seen = [name for name in HACKS if "tampered" in getattr(scores[name], "details", {})]
    assert set(SEEN) <= set(seen)
