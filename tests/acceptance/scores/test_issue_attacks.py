"""Attacks on issues in real sandboxes: a sound row has no finding; one whose tests always or never pass has."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import absent
from workers.cli.task_attacks import AttackOptions, AttackReport, Target, attacked
from workers.cli.task_checks import CheckOptions
from workers.plugins.registry import sandbox as provider

pytestmark = pytest.mark.timeout(1200)
DATA = Path(__file__).parents[3] / "examples/data/swe"
OPTIONS = AttackOptions(CheckOptions(sandbox="namespace", n_parallel=3), n_runs=1, kinds=("skipped-tests",))
FIXED = "8bc19cdbed42cf93d8ea162640a1d5e47c172488"
"""The bundle's commit with all fixes, which is the base in SWE-smith's format."""


def row_of(form: str, **changed: str) -> dict[str, Any]:
    row: dict[str, Any] = json.loads((DATA / f"{form}_form.jsonl").read_text().splitlines()[0])
    bundle = base64.b64encode((DATA / "wordkit.bundle").read_bytes()).decode()
    return {**row, "image": "host", "packages": ["pytest==8.3.5"], "git_bundle": bundle, **changed}


@pytest.fixture(scope="module")
def reports() -> Mapping[str, AttackReport]:
    if missing := provider("namespace").missing():
        absent(missing)
    patch = row_of("swebench_5")["patch"]
    rows = {
        "sound": row_of("swebench_5"),
        "smith": row_of("swe_smith", base_commit=FIXED),
        "passing": row_of("swebench_5", FAIL_TO_PASS=row_of("swebench_5")["PASS_TO_PASS"]),
        "unsolvable": row_of("swebench_5", patch=patch.replace('not in tuple("aeiou")', 'in tuple("aeiou")')),
    }
    targets = [Target(name, "swe-bench", fields) for name, fields in rows.items()]
    return {each.name: each for each in asyncio.run(attacked(targets, OPTIONS, lambda each: None))}


@pytest.mark.parametrize("name", ["sound", "smith"])
def test_sound_row_has_no_finding(reports: Mapping[str, AttackReport], name: str) -> None:
    report = reports[name]
    assert (report.problem, report.findings, report.n_unscored) == ("", {}, 0), report
    assert {each.name for each in report.attacks} >= {"module_skips", "new_text_file"}


def test_issue_that_passes_without_a_fix_is_vacuous(reports: Mapping[str, AttackReport]) -> None:
    assert reports["passing"].findings == {"vacuous": "no-work: new_text_file 1"}, reports["passing"]


def test_issue_that_its_gold_patch_does_not_fix_is_unsolvable(reports: Mapping[str, AttackReport]) -> None:
    assert reports["unsolvable"].findings == {"unsolvable": "its solution scores 0, not 1"}
