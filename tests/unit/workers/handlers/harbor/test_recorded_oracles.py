"""The farm parses like the recorded results of Harbor and terminal-bench; `make test-oracles` runs those again."""

from __future__ import annotations

import json

import pytest

from tests.oracles.doors import DOORS, ROOT, Door, compared

PAGE = ROOT / "docs" / "reference" / "oracles.md"


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_recorded_results_equal_the_farms(door: Door) -> None:
    found = compared(door, json.loads(door.recorded.read_text()))
    assert found.faults == []
    page = PAGE.read_text()
    (row,) = [line.split(" | ") for line in page.splitlines() if line.startswith(f"| `{door.name}` |")]
    counts = [len(door.cases()), found.alike, found.refused, found.known.total()]
    assert [int(cell.strip(" |")) for cell in row[2:]] == counts
    assert [reason for reason in found.known if reason not in page] == []
