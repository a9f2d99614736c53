"""The scorers of programs judge generated outputs and values: `make test-oracles`.

FARM_PROGRAM_JUDGES_RECORD=1 writes their results where `make test` reads them.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.oracles.cases.evalplus_answers import drawn_answers
from tests.oracles.judge_comparisons import ALL_RULES, answers, compare, record, recorded
from tests.oracles.whole_answers import RECORDED, judged
from tests.unit.workers.row_forms.test_evalplus_program import RECORDED as PROGRAMS
from workers.row_forms.fenced_blocks import sanitized

_SANITIZE = Path(__file__).parent / "programs" / "evalplus_sanitize.py"


def test_results_of_the_scorers_equal_the_farms() -> None:
    found = answers()
    faults = [fault for rule, marks in found.items() for fault in compare(rule, marks).faults]
    assert faults == []
    if os.environ.get("FARM_PROGRAM_JUDGES_RECORD"):
        assert set(found) == set(ALL_RULES), "all scorers are needed"
        record(found)
    known = recorded()
    assert found == {rule: known[rule] for rule in found}


def test_scores_of_whole_answers_equal_the_recorded_ones() -> None:
    found = judged()
    if os.environ.get("FARM_PROGRAM_JUDGES_RECORD"):
        RECORDED.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(RECORDED.read_text())


def test_programs_taken_by_evalplus_equal_the_farms() -> None:
    recorded_answers = drawn_answers(150, seed=0)
    drawn = [*recorded_answers, *drawn_answers(850, seed=1)]
    folder = Path(os.environ["FARM_TEST_ORACLES"]) / "judges"
    command = [folder / ".venv" / "bin" / "python", _SANITIZE, folder]
    done = subprocess.run(command, input=json.dumps(drawn), capture_output=True, text=True, timeout=600, check=True)
    theirs = json.loads(done.stdout)
    assert [
        answer for answer, program in zip(drawn, theirs, strict=True) if sanitized(answer, "f") != program.strip()
    ] == []
    found = [list(pair) for pair in zip(recorded_answers, theirs, strict=False)]
    if os.environ.get("FARM_PROGRAM_JUDGES_RECORD"):
        PROGRAMS.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(PROGRAMS.read_text())
