"""The second run of a patch that its log calls resolved, under pytest, where no text that it prints is believed.

`tests.py` runs the same command over the same tests: outcomes are signed, and canaries stand among the tests. The
commands before the tests run on the clean tree, so that no code of the patch runs before pytest does. Only a patch that
changes what is compiled is there already when they run, and is taken out again from all but what they built. In the
sandboxes of controls that is the reference patch.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from farm.errors import EvaluatorError
from farm.records.request import SandboxLimits, SandboxSpec
from workers.evaluators.issues.eval_scripts import parts
from workers.evaluators.issues.issue import Issue
from workers.evaluators.issues.kept_changes import paths_of_patch
from workers.evaluators.issues.staging import git, stage
from workers.evaluators.patches import patch_files, said
from workers.evaluators.tests import PytestEvaluator, TestPlan, UnfitTests
from workers.interfaces import ExecResult, FreshSandbox, Sandbox, Score, Submission

_PYTEST = re.compile(r"(?:^|[\s/])(?:pytest|py\.test)(?:\s|$)", re.MULTILINE)
_MIN_PYTHON = (3, 9)
_VARIABLES = "/tmp/farm-variables"  # noqa: S108  (of the sandbox, which is not shared)
_PATCH = "/tmp/farm-built.patch"  # noqa: S108
_DUMP = f'\n{{ set +x; }} 2>/dev/null; {{ env -0; printf "\\0%s" "$PWD"; }} > {_VARIABLES}\n'
_CLEAN = 'git checkout -q -f "$BASELINE" -- . && git reset -q && git clean -qfd'
_COMPILED = re.compile(r"\.(?:pyx|pxd|pxi|c|cc|cpp|cxx|h|hpp|rs|f|f90)$")
_MIN_S = 10.0


async def confirm(
    issue: Issue, score: Score, patch: bytes, statuses: Mapping[str, str], fresh: FreshSandbox, timeout_s: float
) -> Score:
    """Return the score of a resolved patch after its second run; `details.confirmed` says if there was one.

    It scores 0.0 if tests that passed by the log do not, or the run was tampered with. Raises EvaluatorError.
    """
    before, command = parts(issue.eval_script)
    fail_to_pass = [test for test in issue.fail_to_pass if "::" in test]
    if not _PYTEST.search(command) or not fail_to_pass or issue.expected:
        return _unconfirmed(score, "the tests are not run by a plain pytest command")
    if timeout_s < _MIN_S:
        raise EvaluatorError(f"{issue.instance_id}: no time was left for the second run: raise limits.eval_s")
    plan = TestPlan(
        command=command,
        tree=issue.tree,
        pythonpath=".",
        test_patch=issue.test_patch,
        fail_to_pass=fail_to_pass,
        pass_to_pass=[test for test in issue.pass_to_pass if "::" in test and "PASSED" in said_of(test, statuses)],
        may_xfail=[test for test in fail_to_pass if "XFAIL" in said_of(test, statuses)],
        gold=issue.gold,
    )

    def prepared(built: bytes) -> FreshSandbox:
        @asynccontextmanager
        async def opened(spec: SandboxSpec | None = None, *, layer: bool = False) -> AsyncIterator[Sandbox]:
            async with fresh(spec, layer=layer) as sandbox:
                yield await _prepared(sandbox, issue, before, built, timeout_s / 4)

        return opened

    evaluator = PytestEvaluator(plan, prepared(issue.gold.encode()))
    try:
        second = await evaluator.evaluate(Submission(files=patch_files(patch)), prepared(patch), timeout_s)
    except UnfitTests as error:
        return _unconfirmed(score, str(error))
    if second.value == 1.0:
        return Score(1.0, {**score.details, "confirmed": True})
    tampered = second.details.get("tampered") or second.details.get("reason") or "tests that passed by the log did not"
    return Score(0.0, {**score.details, "tampered": tampered, "second_run": second.details})


def said_of(test: str, statuses: Mapping[str, str]) -> set[str]:
    """Return the statuses that a log gives to a listed test; one whose name was cut may be several of the log's."""
    if test in statuses or "[" not in test:
        return {statuses[test]} if test in statuses else set()
    return {status for name, status in statuses.items() if name.startswith(test)}


def _unconfirmed(score: Score, why: str) -> Score:
    return Score(score.value, {**score.details, "confirmed": False, "unconfirmed_as": why})


async def _prepared(sandbox: Sandbox, issue: Issue, before: str, patch: bytes, timeout_s: float) -> Sandbox:
    """Run what comes before the tests; return the sandbox, with a clean tree, and the variables that it leaves.

    Raises UnfitTests if no outcomes can be read there, EvaluatorError.
    """
    await stage(sandbox, issue, timeout_s)
    if any(map(_COMPILED.search, paths_of_patch(patch))):
        await sandbox.write_file(_PATCH, patch)
        await git(sandbox, issue, f"git apply --whitespace=nowarn {_PATCH}", timeout_s)
    result = await sandbox.exec(["bash", "-c", before + _DUMP], timeout_s=timeout_s, cwd=issue.tree)
    cleaned = await git(sandbox, issue, _CLEAN, timeout_s)
    if result.timed_out or cleaned.code != 0:
        raise EvaluatorError(f"{issue.instance_id}: the clean tree cannot be prepared: {said(result)}; {said(cleaned)}")
    text = (await sandbox.read_file(_VARIABLES)).decode("utf-8", "surrogateescape")
    variables = dict(word.partition("=")[::2] for word in text.split("\0") if "=" in word)
    own = {name: value for name, value in variables.items() if name not in ("PWD", "OLDPWD", "SHLVL", "_")}
    prepared = SandboxWithVariables(sandbox, own)
    if why := await _unfit(prepared):
        raise UnfitTests(why)
    return prepared


async def _unfit(sandbox: Sandbox) -> str:
    """Return why pytest's outcomes cannot be read in this environment; empty if they can."""
    program = "import sys, pytest; print(*sys.version_info[:2])"
    result = await sandbox.exec(["python", "-c", program], timeout_s=60.0, cwd="/")
    if result.code != 0:
        return f"its environment has no python with a pytest: {said(result)}"
    version = tuple(int(number) for number in result.stdout.split()[:2])
    return "" if version >= _MIN_PYTHON else f"its Python is {'.'.join(map(str, version))}, older than 3.9"


class SandboxWithVariables:
    """A sandbox whose commands get further environment variables."""

    def __init__(self, sandbox: Sandbox, variables: Mapping[str, str]) -> None:
        self._sandbox = sandbox
        self._variables = dict(variables)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        """Do as `Sandbox.exec`; the variables of this call come last."""
        more = {**self._variables, **(env or {})}
        return await self._sandbox.exec(argv, timeout_s=timeout_s, stdin=stdin, env=more, cwd=cwd, limits=limits)
