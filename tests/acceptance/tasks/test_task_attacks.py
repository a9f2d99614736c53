"""Attacks on rows of data sets in real sandboxes: each finding on a row that has it, and none on sound rows."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from farm.cli.request_files import read_problems
from farm.client.request_checks import checked_request, with_findings
from farm.settings import settings
from workers.cli.task_attacks import AttackOptions, AttackReport, attacked, targets_of
from workers.cli.task_checks import CheckOptions

OPTIONS = AttackOptions(CheckOptions(sandbox="namespace", n_parallel=4), n_runs=2)
SUMS = [{"stdin": "1 2\n", "expected": "3\n"}, {"stdin": "4 5\n", "expected": "9\n"}]
RIGHT = "print(sum(map(int, input().split())))"
ANYTHING = "import sys\nsys.exit(0)\n"
PADDED = "print(f'{sum(map(int, input().split())):03}')"
# Accepts the expected output always, as a checker that refuses it is a fault of the row, which has no score.
BY_TURNS = """import json, random, sys
case = json.load(sys.stdin)
sys.exit(case["output"].strip() != case["expected"].strip() and random.random() < 0.5)
"""
CALL = [{"arguments": [2], "expected": [True]}, {"arguments": [4], "expected": [True]}]
ROWS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sound": ("programs", {"question": "Add two numbers.", "tests": SUMS, "reference": RIGHT}),
    "constant": ("programs", {"question": "Is it even?", "tests": CALL, "function": "even"}),
    "shown": ("programs", {"question": "Add.\n\n1 2\n\n3\n\n4 5\n\n9", "tests": SUMS}),
    "vacuous": (
        "programs",
        {"question": "Write a poem.", "tests": SUMS[:1], "compare": "checker", "checker": ANYTHING},
    ),
    "unsolvable": ("programs", {"question": "Add two numbers.", "tests": SUMS, "reference": "print(3)"}),
    "computed": ("answer", {"question": "What is $12\\cdot 7$?", "gold": "84"}),
    "restated": ("answer", {"question": "What is $12\\cdot 7$?", "gold": "84", "evaluated": False}),
    "option": ("answer", {"question": "Which is even?", "gold": "B", "options": ["1", "2"]}),
}
FOUND = {
    "sound": set(),
    "constant": {"hackable"},
    "shown": {"hackable"},
    "vacuous": {"vacuous"},
    "unsolvable": {"unsolvable"},
    "computed": set(),
    "restated": {"hackable"},
    "option": set(),
}


def written(path: Path, rows: Mapping[str, tuple[str, Mapping[str, Any]]]) -> Path:
    lines = [{"data_source": source, "fields": dict(f), "instance_id": name} for name, (source, f) in rows.items()]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def reports(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, AttackReport]:
    path = written(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)
    return {each.name: each for each in asyncio.run(attacked(targets_of(path, ""), OPTIONS, lambda each: None))}


@pytest.mark.parametrize("name", ROWS)
def test_attacks_on_a_row_find_its_known_faults(reports: Mapping[str, AttackReport], name: str) -> None:
    report = reports[name]
    assert (report.problem, report.n_unscored) == ("", 0), report
    assert set(report.findings) == FOUND[name], report.findings


def test_findings_name_the_class_of_the_scoring_attack(reports: Mapping[str, AttackReport]) -> None:
    assert "constant-value: constant-True 1" in reports["constant"].findings["hackable"]
    assert reports["shown"].findings["hackable"] == "shown-tests: outputs-in-the-question 1"
    assert "no-work: nothing 1" in reports["vacuous"].findings["vacuous"]
    assert reports["restated"].findings["hackable"] == "restated-question: question-restated 1"
    assert reports["unsolvable"].findings["unsolvable"] == "its solution scores 0, not 1"


def test_batch_of_attacked_rows_reports_their_findings(reports: Mapping[str, AttackReport], tmp_path: Path) -> None:
    instances = read_problems(written(tmp_path / "rows.jsonl", ROWS)).instances

    def findings(some: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        return with_findings(checked_request({"instances": some}), settings().home).findings

    assert findings(instances) == (
        f"1 of {len(ROWS)} tasks is vacuous by `farm tasks attack` (vacuous)",
        f"3 of {len(ROWS)} tasks are hackable by `farm tasks attack` (constant, restated, shown)",
        f"1 of {len(ROWS)} tasks is unsolvable by `farm tasks attack` (unsolvable)",
    )
    assert findings(instances[:1]) == ()


def test_randomly_scoring_solution_is_flaky(place: Path, tmp_path: Path) -> None:
    """Runs of one that is right at random every second time: all alike in one of 32,768 tries."""
    fields = {"question": "Add.", "tests": SUMS[:1], "reference": PADDED, "compare": "checker", "checker": BY_TURNS}
    path = written(tmp_path / "rows.jsonl", {"flaky": ("programs", fields)})
    options = AttackOptions(OPTIONS.check, n_runs=16)
    (report,) = asyncio.run(attacked(targets_of(path, ""), options, lambda each: None))
    assert "flaky" in report.findings, report


def test_attack_command_prints_findings_and_reuses_them(place: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", {name: ROWS[name] for name in ("option", "restated")})
    command = [
        sys.executable,
        "-m",
        "workers.cli.harbor_tasks",
        "attack",
        str(path),
        "--json",
        "--sandbox",
        "namespace",
    ]

    def run(*options: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run([*command, *options], env=os.environ, capture_output=True, text=True, timeout=300)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        return done.returncode, {line["name"]: line for line in lines}

    status, first = run()
    assert (status, first["option"]["findings"], [*first["restated"]["findings"]]) == (1, {}, ["hackable"])
    assert not first["option"]["known"]
    _, second = run()
    assert second["option"]["known"]
    assert second["option"]["scored_at"] == first["option"]["scored_at"]
    _, third = run("--again")
    assert not third["option"]["known"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ('{"question": "q", "gold": "1"}\n', (), "it has no `data_source` and `fields`"),
        ('{"question": "q"}\n', ("--as", "verl"), "a row of verl needs `reward_model`"),
    ],
)
def test_unreadable_file_ends_the_command_with_status_2(
    place: Path, tmp_path: Path, text: str, options: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    command = [sys.executable, "-m", "workers.cli.harbor_tasks", "attack", str(path), *options]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_row_refused_by_its_data_source_is_a_problem_without_findings(place: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", {"broken": ("answer", {"question": "q"})})
    (report,) = asyncio.run(attacked(targets_of(path, ""), OPTIONS, lambda each: None))
    assert "gold" in report.problem
    assert report.findings == {}
