"""One issue of a SWE data set in a common form of all rows: the tree, the tests, and the grading of their log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TREE = "/testbed"
"""The project's tree in the images of these data sets, unless the row names another."""

DataSet = Literal["swe-bench", "swe-gym", "swe-smith", "swe-rebench", "r2e-gym"]
EvalType = Literal["pass_and_fail", "fail_only"]


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
