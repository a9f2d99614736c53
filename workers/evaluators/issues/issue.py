"""One issue of a SWE data set in a common form of all rows, and its tree in a fresh sandbox."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from importlib.resources import files
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


def issue_script(name: str) -> str:
    """Return one of the bash scripts next to this module, which run in the tree."""
    return files("workers.evaluators.issues").joinpath(f"{name}.sh").read_text()


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
    result = await git(sandbox, issue, issue_script("stage_tree") + script("commit_baseline"), timeout_s)
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
    result = await git(sandbox, issue, command + issue_script("remove_future"), timeout_s)
    if result.code != 0:
        raise HandlerError(f"{issue.instance_id}: later commits cannot be removed from the tree: {output_end(result)}")
