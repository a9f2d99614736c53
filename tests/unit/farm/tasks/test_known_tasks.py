"""Footprints and findings of tasks in FARM_HOME, and their lines for a batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farm.client.request_checks import fingerprint, with_findings
from farm.records.request import BatchRequest, Instance
from farm.tasks.known_tasks import (
    ATTACKS,
    CHECKS,
    TaskEvidence,
    evidence_of,
    findings_of,
    keep_evidence,
    keep_text,
)

TASKS = tuple(Instance(data_source="noop", fields={"i": i}, instance_id=f"task-{i}") for i in range(8))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def keep(home: Path, task: Instance, *findings: str, plan: str = "p") -> None:
    keep_text(home, ATTACKS, f"{task.digest}.{plan}.json", json.dumps({"findings": dict.fromkeys(findings, "why")}))


def test_without_reports_there_are_no_findings_and_no_folder_is_made(home: Path) -> None:
    assert (findings_of(home, TASKS), evidence_of(home, "0" * 64)) == ((), TaskEvidence())
    assert not home.exists()


def test_each_finding_is_a_line_with_the_number_and_names_of_its_tasks(home: Path) -> None:
    for task in TASKS[:6]:
        keep(home, task, "hackable")
    keep(home, TASKS[0], "vacuous", plan="q")
    keep(home, TASKS[7])
    assert findings_of(home, [*TASKS, TASKS[0]]) == (
        "1 of 8 tasks is vacuous by `farm tasks attack` (task-0)",
        "6 of 8 tasks are hackable by `farm tasks attack` (task-0, task-1, task-2, task-3, task-4, …)",
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"findings": 3}', '{"findings": ["else", ["vacuous"]]}', "\0"])
def test_unreadable_report_is_ignored(home: Path, text: str) -> None:
    keep_text(home, ATTACKS, f"{TASKS[0].digest}.p.json", text)
    keep(home, TASKS[1], "flaky")
    assert findings_of(home, TASKS) == ("1 of 8 tasks is flaky by `farm tasks attack` (task-1)",)


@pytest.mark.parametrize("evidence", [TaskEvidence(), TaskEvidence(("/usr/bin/tac", "/opt/x/y/"), safe_path=True)])
def test_evidence_is_read_as_it_was_stored(home: Path, evidence: TaskEvidence) -> None:
    keep_evidence(home, "0" * 64, evidence)
    assert evidence_of(home, "0" * 64) == evidence


@pytest.mark.parametrize("text", ["", "[]", '{"footprint": 3}', "\0", '{"footprint": [], "safe_path": "yes"}'])
def test_unreadable_evidence_is_ignored(home: Path, text: str) -> None:
    keep_text(home, CHECKS, f"{'0' * 64}.json", text)
    assert evidence_of(home, "0" * 64) == TaskEvidence()


def test_findings_are_added_to_a_request_without_changing_its_fingerprint(home: Path) -> None:
    before = with_findings(BatchRequest(instances=TASKS), home)
    keep(home, TASKS[3], "unsolvable")
    after = with_findings(before, home)
    assert (before.findings, after.findings) == (
        (),
        ("1 of 8 tasks is unsolvable by `farm tasks attack` (task-3)",),
    )
    assert fingerprint(before) == fingerprint(after)
    # findings sent by the client are kept
    assert with_findings(after.model_copy(update={"findings": ("mine",)}), home).findings == ("mine",)
