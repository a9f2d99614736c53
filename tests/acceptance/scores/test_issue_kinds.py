"""Sample rows on both kinds of sandbox, offline: gold scores 1, another patch 0, and the tree has no later commit."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from farm.records.request import SandboxSpec
from tests.conftest import absent
from tests.integration.scores.issue_project import bundle_of
from workers.evaluators.issues.issue_rows import IssueRow
from workers.handlers.swe_bench import SweBenchHandler
from workers.plugins.interfaces import FreshSandbox, Sandbox
from workers.plugins.registry import sandbox as provider

pytestmark = pytest.mark.timeout(1200)
DATA = Path(__file__).parents[3] / "examples/data/swe"
FIXED = "8bc19cdbed42cf93d8ea162640a1d5e47c172488"
"""The bundle's commit with all fixes; in SWE-smith's format the base."""
INSPECT = f"git cat-file -e {FIXED} && exit 9; git for-each-ref; git log --all --format=%s; git status --porcelain"


def row_of(form: str, number: int) -> tuple[IssueRow, str]:
    """Return a sample row whose tree is its bundle, and its patch."""
    row: dict[str, Any] = json.loads((DATA / f"{form}_form.jsonl").read_text().splitlines()[number])
    bundle = base64.b64encode((DATA / "wordkit.bundle").read_bytes()).decode()
    own = {"image": "host", "packages": ["pytest==8.3.5"], "git_bundle": bundle}
    base = {"base_commit": FIXED} if form == "swe_smith" else {}
    return IssueRow.model_validate({**row, **own, **base}), row["patch"]


def fresh_sandboxes(kind: str, row: IssueRow) -> FreshSandbox:
    own = SweBenchHandler(row).sandbox()
    assert own is not None

    @asynccontextmanager
    async def fresh(spec: SandboxSpec | None = None, *, layer: bool = False) -> AsyncIterator[Sandbox]:
        sandbox = await provider(kind).start(f"test-{uuid.uuid4().hex[:12]}", spec or own)
        try:
            yield sandbox
        finally:
            await sandbox.stop()

    return fresh


@pytest.mark.parametrize(
    ("kind", "form", "number"), [("namespace", "swe_smith", 0), ("singularity", "swebench_classic", 1)]
)
def test_gold_patch_scores_one_and_another_scores_zero(kind: str, form: str, number: int) -> None:
    if missing := provider(kind).missing():
        absent(missing)
    asyncio.run(_gold_resolves_and_another_does_not(kind, *row_of(form, number)))


async def _gold_resolves_and_another_does_not(kind: str, row: IssueRow, patch: str) -> None:
    handler = SweBenchHandler(row)
    fresh = fresh_sandboxes(kind, row)
    async with fresh() as sandbox:
        await handler.prepare(sandbox)
        seen = await sandbox.exec(["bash", "-c", INSPECT], timeout_s=60, cwd=row.tree)
        assert seen.code == 0, seen
        assert len(seen.stdout.splitlines()) == 3, seen
        untouched = await handler.collect(sandbox, None)
        await sandbox.write_file(f"{row.tree}/notes.txt", b"no fix\n")
        other = await handler.collect(sandbox, None)
        apply = ["git", "apply", *(["-R"] if row.data_set == "swe-smith" else []), "-"]
        applied = await sandbox.exec(apply, stdin=patch.encode(), timeout_s=60, cwd=row.tree)
        assert applied.code == 0, applied
        gold = await handler.collect(sandbox, None)
    evaluator = handler.evaluator()
    score = await evaluator.evaluate(gold, fresh, 300.0)
    assert (score.value, score.details["confirmed"]) == (1.0, True), score
    assert (await evaluator.evaluate(other, fresh, 300.0)).value == 0.0
    assert (await evaluator.evaluate(untouched, fresh, 300.0)).details["reason"] == "nothing was changed"


TESTS_OF_R2E = """from calc import add


class TestAdd:
    def test_add(self):
        assert add(1, 2) == 3


def test_never():
    assert False
"""


def test_r2e_gym_requires_the_complete_expected_results(tmp_path: Path) -> None:
    if missing := provider("namespace").missing():
        absent(missing)
    files = {"calc.py": "def add(a, b):\n    return a - b\n", "r2e_tests/test_1.py": TESTS_OF_R2E}
    for path, text in {**files, "run_tests.sh": "python -m pytest -rA r2e_tests\n"}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    commit = "git init -q -b main . && git add -A && git -c user.name=x -c user.email=x commit -qm tree"
    subprocess.run(["bash", "-c", commit], cwd=tmp_path, check=True)
    expected = {"TestAdd.test_add": "PASSED", "test_never": "FAILED"}
    row = {"docker_image": "host", "packages": ["pytest==8.3.5"], "git_bundle": bundle_of(tmp_path)}
    named = {"repo_name": "calc", "problem_statement": "add() subtracts", "expected_output_json": json.dumps(expected)}
    asyncio.run(_the_whole_map_must_come_out(IssueRow.model_validate({**row, **named})))


async def _the_whole_map_must_come_out(row: IssueRow) -> None:
    handler = SweBenchHandler(row)
    fresh = fresh_sandboxes("namespace", row)
    async with fresh() as sandbox:
        await handler.prepare(sandbox)
        seen = await sandbox.exec(["bash", "-c", "ls; git log -p --all | grep test_never"], timeout_s=60, cwd=row.tree)
        assert seen.stdout == b"calc.py\n", seen
        await sandbox.write_file(f"{row.tree}/notes.txt", b"no fix\n")
        other = await handler.collect(sandbox, None)
        await sandbox.exec(["sed", "-i", "s/a - b/a + b/", "calc.py"], timeout_s=60, cwd=row.tree)
        gold = await handler.collect(sandbox, None)
    evaluator = handler.evaluator()
    assert [(await evaluator.evaluate(each, fresh, 300.0)).value for each in (gold, other)] == [1.0, 0.0]
