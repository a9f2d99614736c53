"""The small project of `swe_project.py` as a row of SWE-bench, and sandboxes for scoring its patches."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from farm.records.request import SandboxSpec
from tests.integration.scores.swe_project import SPEC, Project
from workers.config import own_config
from workers.evaluators.issues.issue_rows import IssueRow
from workers.evaluators.issues.resolution import IssueEvaluator
from workers.evaluators.patches import patch_files
from workers.plugins.interfaces import FreshSandbox, Sandbox, Score, Submission
from workers.plugins.registry import sandbox as provider

_TREE = "/testbed"


def bundle_of(folder: Path) -> str:
    """Return the repository of a folder as a git bundle in base64."""
    git = ["git", "-c", "safe.directory=*", "-C", str(folder), "bundle", "create", "-q", "-", "--all"]
    return base64.b64encode(subprocess.run(git, capture_output=True, check=True).stdout).decode()


def row_of(project: Project, folder: Path, fail_to_pass: Sequence[str] = (), **more: str) -> IssueRow:
    """Return the row of the project's issue; its tree comes as a bundle. `fail_to_pass` replaces the plan's.

    `more` are columns to add or replace.
    """
    git = ["git", "-c", "safe.directory=*", "-C", str(folder), "rev-parse", "HEAD"]
    plan = project.plan()
    return IssueRow.model_validate(
        {
            "instance_id": "farm__calc-1",
            "repo": "farm/calc",
            "base_commit": subprocess.run(git, capture_output=True, check=True, text=True).stdout.strip(),
            "problem_statement": "add() subtracts",
            "test_patch": project.test_patch,
            "FAIL_TO_PASS": list(fail_to_pass or plan.fail_to_pass),
            "PASS_TO_PASS": list(plan.pass_to_pass),
            "environment_setup_commit": "",
            "image": "host",
            "packages": list(SPEC.packages),
            "git_bundle": bundle_of(folder),
            "test_cmd": "python -m pytest -rA -p no:cacheprovider",
            **more,
        }
    )


class SharedSandboxes:
    """Sandboxes in which many submissions are scored one after the other, with an empty tree for each."""

    def __init__(self, n_sandboxes: int) -> None:
        self._free: asyncio.Queue[Sandbox | None] = asyncio.Queue()
        for _ in range(n_sandboxes):
            self._free.put_nowait(None)
        self._started: list[Sandbox] = []

    def fresh(self) -> FreshSandbox:
        return self._opened

    @asynccontextmanager
    async def _opened(self, spec: SandboxSpec | None = None, *, layer: bool = False) -> AsyncIterator[Sandbox]:
        sandbox = await self._free.get()
        if sandbox is None:
            spec = SPEC.model_copy(update={"workdir": _TREE})
            sandbox = await provider("namespace").start(f"test-{uuid.uuid4().hex[:12]}", spec)
            self._started.append(sandbox)
        try:
            # including processes that an earlier one left running
            await sandbox.exec(
                ["bash", "-c", f"kill -9 -1; cd /; rm -rf {_TREE}/* {_TREE}/.[!.]* /tmp/*"], timeout_s=20, cwd="/"
            )
            yield sandbox
        finally:
            self._free.put_nowait(sandbox)

    async def close(self) -> None:
        for sandbox in self._started:
            await sandbox.stop()


async def score(row: IssueRow, patch: bytes, fresh: FreshSandbox, timeout_s: float = 200.0) -> Score:
    evaluator = IssueEvaluator(row.issue(), own_config().sandboxes)
    return await evaluator.evaluate(Submission(files=patch_files(patch)), fresh, timeout_s)
