"""Sample rows on both kinds of sandbox, offline: gold scores 1, another patch 0, and the tree has no later commit."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import absent
from workers.evaluators.issues.issue_rows import IssueRow
from workers.handlers.swe_bench import SweBenchHandler
from workers.interfaces import Sandbox
from workers.registry import sandbox as provider

pytestmark = pytest.mark.timeout(1200)
DATA = Path(__file__).parents[3] / "examples/data/swe"
FIXED = "8bc19cdbed42cf93d8ea162640a1d5e47c172488"
"""The commit of the bundle that has all repairs; of SWE-smith's form the base."""
LOOK = f"git cat-file -e {FIXED} && exit 9; git for-each-ref; git log --all --format=%s; git status --porcelain"


def row_of(form: str, number: int) -> tuple[IssueRow, str]:
    """Return a sample row whose tree is its bundle, and its patch."""
    row: dict[str, Any] = json.loads((DATA / f"{form}_form.jsonl").read_text().splitlines()[number])
    bundle = base64.b64encode((DATA / "wordkit.bundle").read_bytes()).decode()
    own = {"image": "host", "packages": ["pytest==8.3.5"], "git_bundle": bundle}
    base = {"base_commit": FIXED} if form == "swe_smith" else {}
    return IssueRow.model_validate({**row, **own, **base}), row["patch"]


@pytest.mark.parametrize(
    ("kind", "form", "number"), [("namespace", "swe_smith", 0), ("singularity", "swebench_classic", 1)]
)
def test_gold_resolves_and_another_patch_does_not(kind: str, form: str, number: int) -> None:
    if missing := provider(kind).missing():
        absent(missing)
    asyncio.run(_gold_resolves_and_another_does_not(kind, *row_of(form, number)))


async def _gold_resolves_and_another_does_not(kind: str, row: IssueRow, patch: str) -> None:
    handler = SweBenchHandler()
    spec = handler.sandbox(row)
    assert spec is not None

    @asynccontextmanager
    async def fresh() -> AsyncIterator[Sandbox]:
        sandbox = await provider(kind).start(f"test-{uuid.uuid4().hex[:12]}", spec)
        try:
            yield sandbox
        finally:
            await sandbox.stop()

    async with fresh() as sandbox:
        await handler.prepare(row, sandbox)
        seen = await sandbox.exec(["bash", "-c", LOOK], timeout_s=60, cwd=row.tree)
        assert seen.code == 0, seen
        assert len(seen.stdout.splitlines()) == 3, seen
        untouched = await handler.collect(row, sandbox, None)
        await sandbox.write_file(f"{row.tree}/notes.txt", b"no fix\n")
        other = await handler.collect(row, sandbox, None)
        apply = ["git", "apply", *(["-R"] if row.data_set == "swe-smith" else []), "-"]
        applied = await sandbox.exec(apply, stdin=patch.encode(), timeout_s=60, cwd=row.tree)
        assert applied.code == 0, applied
        gold = await handler.collect(row, sandbox, None)
    evaluator = handler.evaluator(row)
    score = await evaluator.evaluate(gold, fresh, 300.0)
    assert (score.value, score.details["confirmed"]) == (1.0, True), score
    assert (await evaluator.evaluate(other, fresh, 300.0)).value == 0.0
    assert (await evaluator.evaluate(untouched, fresh, 300.0)).details["reason"] == "nothing was changed"
