"""An honest patch keeps its score if running a test twice breaks a later one; and no line of a test file moves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import absent
from tests.integration.scores.swe_project import GOLD, Pool, Project, score
from workers.plugins.interfaces import Score
from workers.plugins.registry import sandbox as provider

pytestmark = pytest.mark.timeout(600)
TWICE = """

def test_add_is_noted():
    import calc

    calc.noted = [*getattr(calc, "noted", ()), add(1, 2)]
    assert calc.noted[-1] == 3


class TestLater:
    def test_add_was_noted_once(self):
        import calc

        with open(__file__) as file:
            assert file.read().split("\\n")[1:3] == ["", "import pytest"]
        assert calc.noted == [3], "the copy ran before"
"""
FILE = "tests/test_core.py"


def test_patch_keeps_its_score_if_a_repeated_test_breaks_another(tmp_path: Path) -> None:
    if missing := provider("namespace").missing():
        absent(missing)
    project = Project(tmp_path, TWICE)
    fixed = [f"{FILE}::test_add_is_noted", f"{FILE}::TestLater::test_add_was_noted_once"]
    plan = replace(project.plan(), fail_to_pass=fixed, pass_to_pass=[f"{FILE}::test_mul_of_numbers"])

    async def scores() -> list[Score]:
        pool = Pool(1)
        patch = project.patch(GOLD)
        try:
            # the place of a copy is random, before its test or after it
            return [await score(plan, patch, pool.fresh()) for _ in range(6)]
        finally:
            await pool.close()

    result = asyncio.run(scores())
    assert [each.value for each in result] == [1.0] * 6, result
    reasons = {why for each in result for why in each.details["uncopied"]}
    assert reasons == {"a test failed next to the copies"} or not reasons
