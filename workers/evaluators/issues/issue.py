"""One issue of a SWE data set in a common form of all rows, its tree in a fresh sandbox, and its tests' script.

The marks are swebench's. The script is cut where the tests' output ends: the rest would only clean up a tree that is
discarded, and so the exit code of the script is that of the tests, which no output can forge.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from farm.errors import HandlerError
from workers.evaluators.patches import GIT_ENV, output_end, script

if TYPE_CHECKING:
    from workers.plugins.interfaces import ExecResult, Sandbox

TREE = "/testbed"
"""The project's tree in the images of these data sets, unless the row names another."""

DataSet = Literal["swe-bench", "swe-gym", "swe-smith", "swe-rebench", "r2e-gym"]
EvalType = Literal["pass_and_fail", "fail_only"]
_STAGED = "/tmp/farm-staged"  # noqa: S108  (of the sandbox, which is not shared)
HIDDEN = ("/r2e_tests", "/run_tests.sh", "r2e_tests", "run_tests.sh", "/root/r2e_tests", "/root/run_tests.sh")
"""The hidden tests in images of R2E-Gym, absolute or in the tree."""
START = ">>>>> Start Test Output"
END = ">>>>> End Test Output"
EXIT_CODE = ">>>>> Test Exit Code"
_DELIMITER = "EOF_114329324912"
_ACTIVATE = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate; conda activate testbed; fi"
_PYTEST = "pytest -rA"
_COMMANDS = {
    "astropy/astropy": "pytest -rA -vv -o console_output_style=classic --tb=no",
    "django/django": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "mwaskom/seaborn": "pytest --no-header -rA",
    "sphinx-doc/sphinx": "tox --current-env -epy39 -v --",
    "sympy/sympy": "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
}
"""Test commands of SWE-bench's repositories (constants of swebench 4.1), for rows without one."""


@dataclass(frozen=True, slots=True)
class Issue:
    """The policy's tree, and the tests that score it.

    Patches, lists of tests and scripts are never in the policy's sandbox. `eval_script` prints the output of the tests
    between swebench's two marks. `bug_patch` makes the bug in the image's tree; `bundle`, a git bundle in base64,
    contains the tree if the image does not. `expected` is the complete required map of test to status, in place of the
    two lists. `gold_paths` are the paths that the reference solution changes, `gold` is its patch; it is empty for
    SWE-smith, where the tree without the bug is the solution.
    """

    instance_id: str
    data_set: DataSet
    repo: str
    tree: str
    base_commit: str
    eval_script: str
    log_parser: str
    eval_type: EvalType
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    test_patch: str = ""
    version: str = ""
    bug_patch: str = ""
    bundle: str = ""
    expected: tuple[tuple[str, str], ...] = ()
    gold_paths: tuple[str, ...] = ()
    gold: str = ""


async def git(sandbox: Sandbox, issue: Issue, command: str, timeout_s: float, **env: str) -> ExecResult:
    """Run a script in the tree, with git's environment."""
    base = issue.base_commit or "refs/bundle/heads/main"
    own = {**GIT_ENV, "BASE": base, "STAGED": _STAGED, **env}
    return await sandbox.exec(["bash", "-c", command], timeout_s=timeout_s, env=own, cwd=issue.tree)


async def stage(sandbox: Sandbox, issue: Issue, timeout_s: float) -> None:
    """Make the issue's tree and mark it. Raises HandlerError if the image does not fit the row."""
    if issue.bundle:
        await sandbox.write_file(f"{_STAGED}/tree.bundle", base64.b64decode(issue.bundle))
    if issue.bug_patch:
        await sandbox.write_file(f"{_STAGED}/bug.patch", issue.bug_patch.encode())
    result = await git(sandbox, issue, script("issues/stage_tree") + script("commit_baseline"), timeout_s)
    if result.code != 0:
        raise HandlerError(
            f"{issue.instance_id}: its tree cannot be made in {issue.tree}: {output_end(result)}; "
            "is it the row's image?"
        )


async def hide_solution(sandbox: Sandbox, issue: Issue, timeout_s: float) -> None:
    """Remove the image's traces of the solution and of hidden tests. Raises HandlerError."""
    hidden = " ".join(HIDDEN) if issue.expected else ""
    command = f"set -e\nrm -rf {hidden}\n" if hidden else ""
    if issue.expected:
        # If the history contains the tests it is removed, too; the mark then is the tree without them.
        command += f'if [ -n "$(git ls-files -- {" ".join(HIDDEN[2:4])})" ]; then rm -rf .git; fi\n'
        command += script("commit_baseline")
    result = await git(sandbox, issue, command + script("issues/remove_future"), timeout_s)
    if result.code != 0:
        raise HandlerError(f"{issue.instance_id}: later commits cannot be removed from the tree: {output_end(result)}")


def test_command(repo: str) -> str:
    """Return the test command of a repository, without the files."""
    return _COMMANDS.get(repo, _PYTEST)


test_command.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it


def made_script(tree: str, base_commit: str, command: str, files: Sequence[str], test_patch: str) -> str:
    """Return a script in swebench's form: activate, restore and patch the tests, run them between the marks."""
    targets = list(files)
    if "runtests.py" in command:
        # Labels of Django's modules.
        targets = [file.removeprefix("tests/").removesuffix(".py").replace("/", ".") for file in files]
    lines = ["#!/bin/bash", "set -uxo pipefail", _ACTIVATE, f"cd {shlex.quote(tree)}"]
    if test_patch:
        base = base_commit or "HEAD"
        # Files that the test patch adds cannot be restored.
        lines += [f"git checkout {base} -- {shlex.quote(file)} || true" for file in files]
        lines += [f"git apply -v - <<'{_DELIMITER}'", test_patch.rstrip("\n"), _DELIMITER]
    lines += [f": '{START}'", " ".join([command, *map(shlex.quote, targets)]), f": '{END}'"]
    return "\n".join(lines) + "\n"


def parts(script: str) -> tuple[str, str]:
    """Return a script's part before the tests, and the tests' commands. ValueError if a mark is missing."""
    lines = script.split("\n")
    start = next((number for number, line in enumerate(lines) if START in line), None)
    end = next((number for number, line in enumerate(lines) if END in line), None)
    if start is None or end is None or end <= start:
        raise ValueError(f"the eval_script must print {START!r} and, after its tests, {END!r}")
    return "\n".join(lines[:start]), "\n".join(lines[start + 1 : end])


def cut(script: str) -> str:
    """Return the script up to the end of the tests, whose exit code becomes its own."""
    before, tests = parts(script)
    return f"{before}\n: '{START}'\n{tests}\n"


def log_of(output: str, code: int | None) -> str:
    """Return the log that swebench would have written for the output of a cut script and its exit code.

    The first start mark counts; all other marks and exit codes in the output are not the script's. A script that did
    not end (`code` is None) has no end mark, so its log is not graded.
    """
    before, mark, after = output.partition(START)
    for forged in (START, END, EXIT_CODE):
        before, after = before.replace(forged, "?"), after.replace(forged, "?")
    end = "" if code is None else f"\n{END}\n{EXIT_CODE}: {code}\n"
    return f"{before}{mark}{after}{end}"
