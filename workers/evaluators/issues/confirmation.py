"""The second run of a patch that its log calls resolved, under pytest, without trusting any text that it prints.

`tests.py` runs the same command over the same tests: outcomes are signed, and canaries are mixed among the tests. The
commands before the tests run on the clean tree, so that no code of the patch runs before pytest does. If a patch
changes compiled code, it is built elsewhere.

Whether there is a second run depends on the instance: on its command, and on the environment of its clean tree. A
second run without full marks stands if the reference solution passes it.

Building a patch runs its code. So it is built in a separate sandbox, of which only compiled files are kept. They are
copied into a sandbox in which the clean tree was built: over the same files of that build, and, if new, into the
packages of the tree. Everything else that the build changes, such as Python, pytest or a file that git ignores, is
discarded with its sandbox. If the code cannot be compiled, the clean tree's files stay, and the tests fail with them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from farm.errors import EvaluatorError, SandboxError, ToolError
from farm.records.request import SandboxSpec
from workers.evaluators.issues.issue import Issue, git, parts, stage
from workers.evaluators.issues.kept_changes import paths_of_patch
from workers.evaluators.node_conditions import observed
from workers.evaluators.patches import output_end, patch_files, run_program
from workers.evaluators.process_end import ProcessEnd, Trial, settle
from workers.evaluators.tests import PytestEvaluator, TestPlan, UnfitTests
from workers.evaluators.tree_guard import folder_of_tests, steers
from workers.plugins.interfaces import ExecResult, FreshSandbox, Sandbox, Score, Submission

MARK = "/tmp/farm-before"  # noqa: S108  (of the sandbox, which is not shared)
"""A file older than anything that the commands before the tests write; it contains these commands."""
_MIN_PYTHON = (3, 9)
_VARIABLES = "/tmp/farm-variables"  # noqa: S108
_DUMP = f'\n{{ set +x; }} 2>/dev/null; {{ env -0; printf "\\0%s" "$PWD"; }} > {_VARIABLES}\n'
_CLEAN = 'git checkout -q -f "$BASELINE" -- . && git reset -q && git clean -qfd'
_COMPILED = re.compile(r"\.(?:pyx|pxd|pxi|c|cc|cpp|cxx|h|hpp|rs|f|f90)$")
_LIBRARY = re.compile(r"\.so(?:\.\d+)*$")
_ROOTS = ("src", "lib")
_PATCH = "/tmp/farm-built.patch"  # noqa: S108  (of the sandbox, which is not shared)
_COPIES = "/tmp/farm-compiled"  # noqa: S108
_LIST_S = 120.0
_PYTEST = re.compile(r"(?:^|[\s/])(?:pytest|py\.test)(?:\s|$)", re.MULTILINE)
_MIN_S = 10.0
_BUILD_SHARE = 0.25


async def run_before(sandbox: Sandbox, issue: Issue, before: str, timeout_s: float) -> ExecResult:
    """Run the commands before the tests in the issue's tree; `with_variables` returns their exports."""
    await sandbox.write_file(MARK, f"{before}{_DUMP}".encode())
    return await sandbox.exec(["bash", MARK], timeout_s=timeout_s, cwd=issue.tree)


async def with_variables(sandbox: Sandbox) -> SandboxWithVariables:
    """Return the sandbox with the variables saved by `run_before`. Raises ToolError if there are none."""
    text = (await sandbox.read_file(_VARIABLES)).decode("utf-8", "surrogateescape")
    variables = dict(word.partition("=")[::2] for word in text.split("\0") if "=" in word)
    own = {name: value for name, value in variables.items() if name not in ("PWD", "OLDPWD", "SHLVL", "_")}
    return SandboxWithVariables(sandbox, own)


async def prepare(sandbox: Sandbox, issue: Issue, before: str, timeout_s: float) -> SandboxWithVariables:
    """Run the commands before the tests on the staged tree; return the sandbox with their variables and a clean tree.

    Raises UnfitTests if no outcomes can be read there, EvaluatorError.
    """
    result = await run_before(sandbox, issue, before, timeout_s)
    cleaned = await git(sandbox, issue, _CLEAN, timeout_s)
    if result.timed_out or cleaned.code != 0:
        raise EvaluatorError(
            f"{issue.instance_id}: the clean tree cannot be prepared: {output_end(result)}; {output_end(cleaned)}"
        )
    prepared = await with_variables(sandbox)
    if why := await _unfit(prepared):
        raise UnfitTests(why)
    return prepared


async def _unfit(sandbox: Sandbox) -> str:
    program = "import sys, pytest; print(*sys.version_info[:2])"
    result = await sandbox.exec(["python", "-c", program], timeout_s=60.0, cwd="/")
    if result.code != 0:
        return f"its environment has no python with a pytest: {output_end(result)}"
    version = tuple(int(number) for number in result.stdout.split()[:2])
    return "" if version >= _MIN_PYTHON else f"its Python is {'.'.join(map(str, version))}, older than 3.9"


class SandboxWithVariables:
    """A sandbox whose commands get additional environment variables."""

    def __init__(self, sandbox: Sandbox, variables: Mapping[str, str]) -> None:
        self._sandbox = sandbox
        self._variables = dict(variables)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def exec(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> ExecResult:
        """Like `Sandbox.exec`; the variables of this call take precedence."""
        return await self._sandbox.exec(argv, env={**self._variables, **(env or {})}, **options)


class NotBuilt(EvaluatorError):
    """The build of a patch hangs or ends its sandbox, while that of the clean tree does not."""


@dataclass(frozen=True, slots=True)
class _Built:
    """The compiled files on the node, by their paths in a sandbox; or the reason why there are none."""

    files: Mapping[str, Path] = field(default_factory=dict)
    failure: str = ""


class PatchBuild:
    """The build of a patch, once, by the commands before the tests; skipped if the patch changes no compiled code.

    `folder` on the node gets the compiled files; `timeout_s` is the time limit of a build.
    """

    def __init__(
        self, issue: Issue, before: str, patch: bytes, fresh: FreshSandbox, folder: Path, timeout_s: float
    ) -> None:
        self._issue = issue
        self._before = before
        self._patch = patch if any(map(_COMPILED.search, paths_of_patch(patch))) else b""
        self._fresh = fresh
        self._folder = folder
        self._timeout_s = timeout_s
        self._building: asyncio.Task[_Built] | None = None

    async def files(self) -> Mapping[str, Path]:
        """Return the compiled files on the node by their paths in a sandbox. Raises NotBuilt, EvaluatorError."""
        if not self._patch:
            return {}
        self._building = self._building or asyncio.create_task(self._settled())
        built = await self._building
        if built.failure:
            raise NotBuilt(f"{self._issue.instance_id}: the patch cannot be built: {built.failure}")
        return built.files

    async def put(self, sandbox: Sandbox) -> None:
        """Copy the compiled files into a sandbox in which the clean tree was built."""
        if not (built := await self.files()):
            return
        clean = await _listed(sandbox, self._issue, "")
        for path, file in built.items():
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            if digest != clean.get(path) and (path in clean or self._may_be_new(path)):
                await sandbox.upload(file, path)

    async def _settled(self) -> _Built:
        async def control() -> str:
            async with self._fresh() as sandbox:
                await stage(sandbox, self._issue, self._timeout_s)
                await prepare(sandbox, self._issue, self._before, self._timeout_s)
            return ""

        return await settle(self._trial, control, f"the build of a patch of {self._issue.instance_id}")

    async def _trial(self) -> Trial[_Built]:
        built = _Built()
        async with observed() as conditions, self._fresh() as sandbox:
            await stage(sandbox, self._issue, self._timeout_s)
            await sandbox.write_file(_PATCH, self._patch)
            result = await git(sandbox, self._issue, f"git apply --whitespace=nowarn {_PATCH}", self._timeout_s)
            if result.code != 0:
                # The run of the tests reports it, too.
                return Trial(built, ProcessEnd.of(result, self._timeout_s, conditions))
            try:
                result = await run_before(sandbox, self._issue, self._before, self._timeout_s)
                if result.timed_out:
                    built = _Built(failure=f"it takes more than {self._timeout_s:.0f} s")
                else:
                    built = _Built(await self._taken(sandbox))
            except (SandboxError, ToolError, ValueError) as error:
                gone = f"nothing can be read of its build: {error}"
                return Trial(_Built(failure=gone), ProcessEnd(None, gone=gone, conditions=conditions))
        end = ProcessEnd.of(result, self._timeout_s, conditions)
        return Trial(built, end, passed=bool(built.files))

    async def _taken(self, sandbox: Sandbox) -> Mapping[str, Path]:
        """Copy the compiled files out of the sandbox, without trusting its description of them."""
        paths = list(await _listed(await with_variables(sandbox), self._issue, _COPIES))
        self._folder.mkdir(exist_ok=True)
        target = self._folder / str(len(list(self._folder.iterdir())))
        await sandbox.download(_COPIES, target)
        copies = {path: target / str(number) for number, path in enumerate(paths)}
        return {path: file for path, file in copies.items() if path.startswith("/") and _is_compiled(file)}

    def _may_be_new(self, path: str) -> bool:
        """Return True for a library in a non-test folder of the tree below those that Python searches."""
        if not path.startswith(f"{self._issue.tree}/") or not _LIBRARY.search(path):
            return False
        parts = path.removeprefix(f"{self._issue.tree}/").split("/")
        below = "/".join(parts)
        is_plain = not {"", ".", ".."} & set(parts) and not steers(below) and not folder_of_tests(below)
        return is_plain and len(parts) > (2 if parts[0] in _ROOTS else 1)


async def _listed(sandbox: Sandbox, issue: Issue, copies: str) -> dict[str, str]:
    request = {"tree": issue.tree, "mark": MARK, "copies": copies}
    result = await run_program(sandbox, "issues.compiled_files", request, _LIST_S)
    return {str(path): str(digest) for path, digest in json.loads(result.stdout)}


def _is_compiled(file: Path) -> bool:
    if file.is_symlink() or not file.is_file():
        return False
    file.chmod(0o755)
    with file.open("rb") as opened:
        return opened.read(4) == b"\x7fELF"


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
