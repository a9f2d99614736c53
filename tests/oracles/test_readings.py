"""The farm reads what Harbor and terminal-bench read, and refuses what they refuse, except as listed in `doors.py`."""

from __future__ import annotations

import json

import pytest

from tests.oracles.doors import DOORS, Door, compared, query_oracle


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_results_of_the_oracle_equal_the_farms(door: Door) -> None:
    answers = query_oracle(door)
    assert compared(door, answers).faults == []
    recorded = json.loads(door.recorded.read_text())
    assert answers == recorded, "python -m tests.oracles.record DIR records the oracle's new results"
