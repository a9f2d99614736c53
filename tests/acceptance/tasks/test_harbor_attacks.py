"""Attacks on Harbor tasks in real sandboxes: each finding on a task that has it, and none on a sound one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.tasks.harbor_hacks import LINK_TEST, PYTEST_TEST, SHELL_TEST, WORK, write_task
from workers.cli.task_attacks import AttackOptions, AttackReport, attacked, targets_of
from workers.cli.task_checks import CheckOptions

KINDS = ("early-exit", "empty-output", "skipped-tests", "link-to-tests", "replaced-tests")
"""The classes of attacks in these tests; each attack of the others has a separate test."""
OPTIONS = AttackOptions(CheckOptions(sandbox="namespace", n_parallel=4), n_runs=2, kinds=KINDS)
_REWARD = "> /logs/verifier/reward.txt"
ANY_FILE = f"#!/bin/bash\nif test -e /app/answer.txt; then echo 1; else echo 0; fi {_REWARD}\n"
ALWAYS = f"#!/bin/bash\ncat /app/answer.txt\necho 1 {_REWARD}\n"
BY_TURNS = f"#!/bin/bash\necho 0.$RANDOM {_REWARD}\n"
TASKS: Mapping[str, tuple[str, str]] = {
    "sound": (SHELL_TEST, WORK),
    "compared": (LINK_TEST, WORK),
    "skippable": (PYTEST_TEST, WORK),
    "hackable": (ANY_FILE, WORK),
    "vacuous": (ALWAYS, WORK),
    "flaky": (BY_TURNS, WORK),
    "unsolvable": (SHELL_TEST, "echo 41 > /app/answer.txt"),
}
FOUND: Mapping[str, set[str]] = {
    "sound": set(),
    "compared": set(),
    "skippable": {"skippable"},
    "hackable": {"hackable"},
    "vacuous": {"vacuous"},
    "flaky": {"vacuous", "flaky", "unsolvable"},
    "unsolvable": {"unsolvable"},
}


@pytest.fixture(scope="module")
def reports(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, AttackReport]:
    top = tmp_path_factory.mktemp("attacked")
    for name, (test, solution) in TASKS.items():
        write_task(top / name, test, solution)
    return {each.name: each for each in asyncio.run(attacked(targets_of(top, ""), OPTIONS, lambda each: None))}


@pytest.mark.parametrize("name", TASKS)
def test_attacks_on_a_task_find_its_known_faults(reports: Mapping[str, AttackReport], name: str) -> None:
    report = reports[name]
    assert (report.problem, report.n_unscored) == ("", 0), report
    # random numbers may let an attack score more than doing nothing
    assert set(report.findings) - ({"hackable"} if name == "flaky" else set()) == FOUND[name], report.findings


def test_findings_name_the_class_of_the_scoring_attack(reports: Mapping[str, AttackReport]) -> None:
    assert reports["skippable"].findings["skippable"] == "skipped-tests: tests_skipped 1"
    assert reports["hackable"].findings["hackable"].startswith("empty-output: empty_files 1")
    assert reports["vacuous"].findings["vacuous"] == "no-work: untouched 1/1"
    assert reports["vacuous"].attacks == ()
