"""The scorers of programs judge generated outputs and values: `make test-oracles`.

FARM_PROGRAM_JUDGES_RECORD=1 writes their answers where `make test` reads them.
"""

from __future__ import annotations

import json
import os

from tests.oracles.judge_doors import ALL_RULES, answers, compared, record, recorded
from tests.oracles.whole_answers import RECORDED, judged


def test_the_scorers_answers_are_the_farm_s() -> None:
    found = answers()
    faults = [fault for rule, marks in found.items() for fault in compared(rule, marks).faults]
    assert faults == []
    if os.environ.get("FARM_PROGRAM_JUDGES_RECORD"):
        assert set(found) == set(ALL_RULES), "all scorers are needed"
        record(found)
    known = recorded()
    assert found == {rule: known[rule] for rule in found}


def test_the_scorers_scores_of_whole_answers_are_the_recorded_ones() -> None:
    found = judged()
    if os.environ.get("FARM_PROGRAM_JUDGES_RECORD"):
        RECORDED.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(RECORDED.read_text())
