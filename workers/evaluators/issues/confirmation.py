"""The second run of a patch that its log calls resolved, under pytest, without trusting any text that it prints.

`tests.py` runs the same command over the same tests: outcomes are signed, and canaries are mixed among the tests. The
commands before the tests run on the clean tree, so that no code of the patch runs before pytest does. If a patch
changes compiled code, it is built elsewhere; see `patch_build.py`.

Whether there is a second run depends on the instance: on its command, and on the environment of its clean tree. A
second run without full marks stands if the reference solution passes it.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from farm.errors import EvaluatorError
from farm.records.request import SandboxSpec
from workers.evaluators.issues.issue import Issue, parts, stage
from workers.evaluators.issues.patch_build import NotBuilt, PatchBuild, prepare
from workers.evaluators.patches import patch_files
from workers.evaluators.process_end import ProcessEnd, Trial, settle
from workers.evaluators.tests import PytestEvaluator, TestPlan, UnfitTests
from workers.plugins.interfaces import FreshSandbox, Sandbox, Score, Submission

_PYTEST = re.compile(r"(?:^|[\s/])(?:pytest|py\.test)(?:\s|$)", re.MULTILINE)
_MIN_S = 10.0
_BUILD_SHARE = 0.25


async def confirm(
    issue: Issue, score: Score, patch: bytes, statuses: Mapping[str, str], fresh: FreshSandbox, timeout_s: float
) -> Score:
    """Return the score of a resolved patch after its second run; `details.confirmed` says if there was one.

    It is 0.0 if tests that passed by the log do not, or if the run was tampered with. Raises EvaluatorError.
    """
    before, command = parts(issue.eval_script)
    fail_to_pass = [test for test in issue.fail_to_pass if "::" in test]
    if not _PYTEST.search(command) or not fail_to_pass or issue.expected:
        return _unconfirmed(score, "the tests do not run by a plain pytest command")
    if timeout_s < _MIN_S:
        raise EvaluatorError(f"{issue.instance_id}: no time was left for the second run: raise limits.eval_s")
    plan = TestPlan(
        command=command,
        tree=issue.tree,
        pythonpath=".",
        test_patch=issue.test_patch,
        fail_to_pass=fail_to_pass,
        pass_to_pass=[test for test in issue.pass_to_pass if "::" in test and "PASSED" in statuses_of(test, statuses)],
        may_xfail=[test for test in fail_to_pass if "XFAIL" in statuses_of(test, statuses)],
        gold=issue.gold,
    )

    try:
        second = await _second_run(issue, before, plan, patch, fresh, timeout_s)
    except UnfitTests as error:
        return _unconfirmed(score, str(error))
    if second.value == 1.0:
        return Score(1.0, {**score.details, "confirmed": True})
    tampered = second.details.get("tampered") or second.details.get("reason") or "tests that passed by the log did not"
    return Score(0.0, {**score.details, "tampered": tampered, "second_run": second.details})


async def _second_run(
    issue: Issue, before: str, plan: TestPlan, patch: bytes, fresh: FreshSandbox, timeout_s: float
) -> Score:
    deadline = time.monotonic() + timeout_s
    build_s = timeout_s * _BUILD_SHARE
    solved = replace(issue, bug_patch="")

    async def scored(patch: bytes, built: PatchBuild, run_issue: Issue) -> Score:
        opened = _prepared(run_issue, before, built, fresh, build_s)
        evaluator = PytestEvaluator(plan, _prepared(issue, before, solution, fresh, build_s))
        return await evaluator.evaluate(Submission(files=patch_files(patch)), opened, deadline - time.monotonic())

    async def trial() -> Trial[Score]:
        built = PatchBuild(issue, before, patch, fresh, folder / "patch", build_s)
        try:
            await built.files()
        except NotBuilt as error:
            return Trial(Score(0.0, {"reason": str(error)}), ProcessEnd(0), stands=True)
        second = await scored(patch, built, issue)
        stands = bool(second.details.get("tampered")) or deadline - time.monotonic() < timeout_s / 2
        return Trial(second, ProcessEnd(0), passed=second.value == 1.0, stands=stands or not has_solution)

    async def control() -> str:
        second = await scored(solved.gold.encode(), solution, solved)
        return "" if second.value == 1.0 else f"the reference solution has {second.value} in it: {second.details}"

    has_solution = bool(solved.gold.strip() or issue.bug_patch)
    scratch = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="farm-built-")
    try:
        folder = Path(scratch.name)
        solution = PatchBuild(issue, before, solved.gold.encode(), fresh, folder / "solution", build_s)
        what = f"the second run of a patch of {issue.instance_id}"
        return await settle(trial, control, what, scorer=f"confirmation {issue.instance_id} {plan.key}")
    finally:
        await asyncio.to_thread(scratch.cleanup)


def _prepared(issue: Issue, before: str, built: PatchBuild, fresh: FreshSandbox, timeout_s: float) -> FreshSandbox:
    """Return sandboxes for the tests of the clean tree, with the compiled files of a patch."""

    @asynccontextmanager
    async def opened(spec: SandboxSpec | None = None, *, layer: bool = False) -> AsyncIterator[Sandbox]:
        await built.files()
        async with fresh(spec, layer=layer) as sandbox:
            await stage(sandbox, issue, timeout_s)
            prepared = await prepare(sandbox, issue, before, timeout_s)
            await built.put(prepared)
            yield prepared

    return opened


def statuses_of(test: str, statuses: Mapping[str, str]) -> set[str]:
    """Return the log's statuses of a listed test; a truncated name may match several tests of the log."""
    if test in statuses or "[" not in test:
        return {statuses[test]} if test in statuses else set()
    return {status for name, status in statuses.items() if name.startswith(test)}


def _unconfirmed(score: Score, why: str) -> Score:
    return Score(score.value, {**score.details, "confirmed": False, "unconfirmed_as": why})
