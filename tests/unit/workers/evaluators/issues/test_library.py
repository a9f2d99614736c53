"""Logs are graded by the swebench library."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from farm.errors import EvaluatorError
from tests.conftest import absent
from workers.config import own_config
from workers.evaluators.issues.issue import START, Issue, log_of
from workers.evaluators.issues.library import GradedLog, grade, library_folders
from workers.evaluators.issues.resolution import whole_map

ISSUE = Issue(
    instance_id="x__x-1",
    data_set="swe-bench",
    repo="x/x",
    tree="/testbed",
    base_commit="",
    eval_script="",
    log_parser="",
    eval_type="pass_and_fail",
    fail_to_pass=("t.py::test_a",),
    pass_to_pass=("t.py::test_b",),
)
PASSED = "PASSED t.py::test_a\nPASSED t.py::test_b\n"


@pytest.fixture(scope="module")
def folders() -> list[str]:
    try:
        folders = asyncio.run(library_folders(own_config().sandboxes))
    except EvaluatorError as error:
        absent(str(error))
    return folders


def graded(issue: Issue, output: str, code: int | None) -> GradedLog:
    return asyncio.run(grade(own_config().sandboxes, issue, log_of(f"{START}\n{output}", code)))


@pytest.mark.parametrize(
    ("output", "code", "resolved", "complete"),
    [
        (PASSED, 0, True, True),
        (PASSED, 1, False, False),
        (PASSED, None, False, False),
        ("FAILED t.py::test_a - assert\nPASSED t.py::test_b\n", 1, False, True),
        ("PASSED t.py::test_a\nSKIPPED t.py::test_b\n", 0, True, True),
        ("SKIPPED t.py::test_a\nPASSED t.py::test_b\n", 0, False, True),
        ("", 0, False, False),
    ],
    ids=["passed", "contradicts_exit_code", "cut_off", "failed", "kept_one_skipped", "mended_one_skipped", "no_result"],
)
def test_logs_are_graded(folders: list[str], output: str, code: int | None, resolved: bool, complete: bool) -> None:
    result = graded(ISSUE, output, code)
    assert (result.resolved, result.complete) == (resolved, complete)
    assert not result.infra_failure


def test_environment_faults_are_named(folders: list[str]) -> None:
    assert graded(ISSUE, "fork: Cannot allocate memory\n", 1).infra_failure == "out_of_memory"
    # a patch can cause that, too
    assert not graded(ISSUE, "ModuleNotFoundError: x\n", 1).infra_failure


def test_truncated_ids_match_by_prefix_and_contradictions_are_reported(folders: list[str]) -> None:
    cut_off = replace(ISSUE, fail_to_pass=("t.py::test_a[log(photon",), pass_to_pass=())
    assert graded(cut_off, "PASSED t.py::test_a[log(photon/m]\n", 0).resolved
    result = graded(ISSUE, f"FAILED t.py::test_a - assert\n{PASSED}", 0)
    assert result.contradicted == ("t.py::test_a",)


def test_parser_missing_in_the_library_is_refused_by_name(folders: list[str]) -> None:
    with pytest.raises(EvaluatorError, match=r"x__x-1: swebench 5\.0\.2 has no parser 'parse_log_own'") as refused:
        graded(replace(ISSUE, log_parser="parse_log_own"), PASSED, 0)
    assert not refused.value.retryable


def test_complete_status_maps_of_r2e_gym() -> None:
    statuses = {"t.py::TestA::test_b[1 - 2]": "PASSED", "t.py::test_c": "ERROR", "t.py::test_d": "SKIPPED"}
    assert whole_map(statuses) == {"TestA.test_b[1": "PASSED", "test_c": "ERROR"}
