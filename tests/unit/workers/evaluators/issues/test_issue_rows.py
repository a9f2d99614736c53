"""Rows of SWE data sets in all their forms are parsed into one issue; unscorable rows are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from farm.errors import HandlerError
from workers.evaluators.issues.issue import parts
from workers.evaluators.issues.issue_rows import IssueRow, image_of

DATA = Path(__file__).parents[5] / "examples/data/swe"
R2E = {
    "repo_name": "numpy",
    "docker_image": "namanjain12/numpy_final:0123456789abcdef",
    "problem_statement": "fix it",
    "expected_output_json": '{"TestA.test_b": "PASSED", "test_c": "FAILED"}',
    "parsed_commit_content": "{}",
}


def rows(form: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{form}_form.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("form", "data_set", "image"),
    [
        ("swebench_5", "swe-bench", "docker://swebench/sweb.eval.x86_64.farm_1776_wordkit-1:latest"),
        ("swebench_classic", "swe-bench", "docker://swebench/sweb.eval.x86_64.farm_1776_wordkit-1:latest"),
        ("swe_rebench", "swe-rebench", "docker://swerebench/sweb.eval.x86_64.farm_1776_wordkit-1"),
        ("swe_smith", "swe-smith", "docker://jyangballin/swesmith.x86_64.farm_1776_wordkit.8bc19cdb"),
        ("nemo_gym_swe", "swe-bench", "docker://swebench/sweb.eval.x86_64.farm_1776_wordkit-1:latest"),
    ],
)
def test_row_forms_are_parsed(form: str, data_set: str, image: str) -> None:
    first, second = map(IssueRow.model_validate, rows(form))
    issue = first.issue()
    assert (issue.data_set, image_of(first, {})) == (data_set, image)
    assert issue.fail_to_pass == tuple(f"tests/test_plural.py::test_many[{name}]" for name in ("day-days", "y-ys"))
    assert second.issue().pass_to_pass[0] == "tests/test_wrap.py::test_wraps"
    assert "pytest" in parts(issue.eval_script)[1]
    assert "tests/test_plural.py" in parts(issue.eval_script)[1]
    assert bool(issue.bug_patch) == (form == "swe_smith")
    assert "plural() is wrong" in first.statement
    assert first.patch not in first.statement


def test_rows_of_r2e_gym_are_parsed() -> None:
    issue = IssueRow.model_validate(R2E).issue()
    assert issue.instance_id == "numpy__0123456789abcdef"
    assert issue.expected == (("TestA.test_b", "PASSED"), ("test_c", "FAILED"))
    assert "run_tests.sh" in parts(issue.eval_script)[1]


def test_rows_without_columns_of_swe_bench_are_those_of_swe_gym() -> None:
    row = {name: value for name, value in rows("swebench_classic")[0].items() if name != "environment_setup_commit"}
    gym = IssueRow.model_validate(row)
    assert image_of(gym, {}) == "docker://xingyaoww/sweb.eval.x86_64.farm_s_wordkit-1:latest"
    assert IssueRow.model_validate({**row, "data_set": "swe-bench"}).data_set == "swe-bench"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"FAIL_TO_PASS": "[]"}, "no test must turn green"),
        ({"FAIL_TO_PASS": "[nothing"}, "FAIL_TO_PASS"),
        ({"test_patch": "nothing"}, "must be a unified diff"),
        ({"instance_id": ""}, "instance_id"),
        ({"eval_script": "pytest"}, "the eval_script must print"),
        ({"log_parser": "os.system"}, "log_parser"),
        ({"eval_type": "other"}, "eval_type"),
        ({"base_commit": "main; rm -rf /"}, "base_commit"),
        ({"tree": "/a b"}, "tree"),
        ({"data_set": "swe-smith", "patch": ""}, "makes the bug"),
        ({"packages": ["pytest>=8"]}, "packages"),
        ({"responses_create_params": {"input": []}}, "instance_dict is missing"),
    ],
)
def test_unscorable_rows_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        IssueRow.model_validate({**rows("swebench_5")[0], **change})


def test_images_are_named_by_templates_of_the_node() -> None:
    row = IssueRow.model_validate(rows("swebench_5")[0])
    assert image_of(row, {"swe-bench": "/images/{id_1776}.sif"}) == "/images/farm_1776_wordkit-1.sif"
    assert image_of(row, {"swe-bench": "mirror.example/{image}"}) == (
        "docker://mirror.example/swebench/sweb.eval.x86_64.farm_1776_wordkit-1"
    )
    assert image_of(row, {"swe-smith": "/x"}) == image_of(row, {})
    with pytest.raises(HandlerError, match=r"the template '/\{name\}' of swe-bench is invalid.*\{id_1776\}"):
        image_of(row, {"swe-bench": "/{name}"})
    without = IssueRow.model_validate({**R2E, "docker_image": "", "instance_id": "x"})
    with pytest.raises(HandlerError, match="set FARM_SWE_IMAGES"):
        image_of(without, {})
