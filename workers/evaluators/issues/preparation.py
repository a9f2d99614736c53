"""The environment of an issue's tests after the commands before them, with a clean tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farm.errors import EvaluatorError
from farm.records.request import SandboxLimits
from workers.evaluators.issues.issue import Issue, git
from workers.evaluators.patches import output_end
from workers.evaluators.tests import UnfitTests
from workers.plugins.interfaces import ExecResult, Sandbox

MARK = "/tmp/farm-before"  # noqa: S108  (of the sandbox, which is not shared)
"""A file older than anything that the commands before the tests write; it contains these commands."""
_MIN_PYTHON = (3, 9)
_VARIABLES = "/tmp/farm-variables"  # noqa: S108
_DUMP = f'\n{{ set +x; }} 2>/dev/null; {{ env -0; printf "\\0%s" "$PWD"; }} > {_VARIABLES}\n'
_CLEAN = 'git checkout -q -f "$BASELINE" -- . && git reset -q && git clean -qfd'


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
    """Return why pytest's outcomes cannot be read in this environment; empty if they can."""
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
        """Like `Sandbox.exec`; the variables of this call take precedence."""
        more = {**self._variables, **(env or {})}
        return await self._sandbox.exec(argv, timeout_s=timeout_s, stdin=stdin, env=more, cwd=cwd, limits=limits)
