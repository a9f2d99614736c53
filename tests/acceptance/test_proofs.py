"""Intact scorers pass their proofs, even below a folder that only root can enter; broken ones do not."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from farm.cli.doctor import examine_scorers
from farm.errors import EvaluatorError
from workers.proofs.known_submissions import proofs
from workers.proofs.proof import Known, NotProvable, Proof, prove

ROOT = Path(__file__).parents[2]
IN_SANDBOXES = ("swe", "environment", "code", "programs", "programs (function)", "programs (checker)", "harbor")
_RAISES = ("\nimport", "\nraise ImportError\nimport")
_CONTROL = "a control that must pass did not"
BROKEN = [
    ("code", "workers/evaluators/program_judge.py", *_RAISES, "a control that must pass also failed"),
    ("code", "workers/evaluators/program_candidate.py", *_RAISES, "a control that must pass also failed"),
    ("programs", "workers/evaluators/program_tests/evaluator.py", ".stdout.decode(", ".stderr.decode(", _CONTROL),
    ("programs (function)", "workers/evaluators/program_tests/function_call.py", *_RAISES, _CONTROL),
    ("harbor", "workers/handlers/harbor/harbor_verifier.py", "TESTS}/test.sh", "TESTS}/tests.sh", "wrote neither"),
    ("environment", "workers/environments/environment_server.py", 'if "step" in', 'if "steps" in', "known"),
    ("swe", "workers/evaluators/outcomes_plugin.py", *_RAISES, _CONTROL),
    (
        "swe-bench",
        "workers/evaluators/issues/library_program.py",
        'log.write(job["log"])',
        'log.write("")',
        "no results",
    ),
]
"""Damaged scorers: the file, the replaced text, its replacement, and a part of the proof's error."""


def closed_copy(folder: Path) -> Path:
    """Return a copy of the product that only root can enter."""
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    for package in ("farm", "workers"):
        shutil.copytree(ROOT / package, closed / package, ignore=shutil.ignore_patterns("__pycache__"))
    return closed


def results(folder: Path, *words: str) -> dict[str, dict[str, str]]:
    program = (
        f"import sys\nsys.path.insert(0, {str(folder)!r})\nfrom workers.proofs.__main__ import main\nmain({words})"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True, cwd=folder)
    return {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}


def test_every_scorer_passes_its_proof() -> None:
    found = list(examine_scorers([sys.executable, "-m", "workers.proofs", "--fetch"]))
    assert {each.what for each in found} == {f"scorer {proof.name}" for proof in proofs()}
    assert [each for each in found if not each.ok] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root drops to another user")
def test_sandboxed_scorers_pass_below_a_folder_only_root_can_enter(tmp_path: Path) -> None:
    found = results(closed_copy(tmp_path), "--fetch", *IN_SANDBOXES)
    assert found.keys() == set(IN_SANDBOXES)
    assert {name: each["failure"] for name, each in found.items() if each["failure"]} == {}


@pytest.mark.parametrize(("name", "path", "whole", "broken", "reason"), BROKEN)
def test_broken_scorer_fails_its_proof(
    name: str, path: str, whole: str, broken: str, reason: str, tmp_path: Path
) -> None:
    file = closed_copy(tmp_path) / path
    text = file.read_text()
    assert whole in text
    file.write_text(text.replace(whole, broken, 1))
    (result,) = results(tmp_path / "closed", "--fetch", name).values()
    assert reason in result["failure"]


def proof_result(right: float | Exception, wrong: float | Exception = 0.0) -> tuple[str, str]:
    async def score(known: Known) -> float:
        given = {"right": right, "wrong": wrong}[known]
        if isinstance(given, Exception):
            raise given
        return given

    result = asyncio.run(prove(Proof("it", score)))
    return result.failure, result.skipped


@pytest.mark.parametrize(
    ("right", "wrong", "failure"),
    [
        (1.0, 0.0, ""),
        (0.0, 0.0, "it gives a right submission 0, not 1"),
        (1.0, 1.0, "it gives a wrong submission 1, not 0"),
        (float("nan"), 0.0, "it gives a right submission nan, not 1"),
        (EvaluatorError("no disk"), 0.0, "no disk"),
        (1.0, KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_wrong_score_or_error_fails_the_proof(right: float | Exception, wrong: float | Exception, failure: str) -> None:
    assert proof_result(right, wrong) == (failure, "")


def test_missing_dependency_is_skipped_and_no_failure() -> None:
    assert proof_result(NotProvable("there is no pytest")) == ("", "there is no pytest")


def test_hanging_scorer_fails_its_proof() -> None:
    async def hangs(known: Known) -> float:
        await asyncio.sleep(3600)
        return 1.0

    assert asyncio.run(prove(Proof("it", hangs), 0.1)).failure == "it did not score two known submissions within 0.1 s"


def test_doctor_names_the_failing_scorer_and_its_remedy() -> None:
    lines = [
        {"name": "code", "failure": "it gives a right submission 0, not 1", "skipped": "", "took_s": 1.0},
        {"name": "swe", "failure": "", "skipped": "no pytest", "took_s": 0.0},
        {"name": "math", "failure": "", "skipped": "", "took_s": 2.0},
    ]
    program = f"import json, sys\nfor line in {lines!r}: print(json.dumps(line))\nsys.exit('oops')"
    code, math, swe, end = examine_scorers([sys.executable, "-c", program])
    assert (code.ok, code.needed, code.detail) == (False, True, "it gives a right submission 0, not 1")
    assert "-m workers.proofs 'code'" in code.remedy
    assert (math.ok, math.detail) == (True, "tells known submissions apart, in 2.0 s")
    assert (swe.ok, swe.needed, swe.detail) == (False, False, "not proven: no pytest")
    assert (end.ok, end.what, end.detail) == (False, "scorers", "the proofs stopped early: oops")
