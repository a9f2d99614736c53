"""The farm parses like the recorded results of Harbor and terminal-bench; `make test-oracles` runs those again."""

from __future__ import annotations

import json

import pytest

from tests.oracles.comparisons import COMPARISONS, ROOT, OracleComparison, compare

PAGE = ROOT / "docs" / "reference" / "oracles.md"


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.name)
def test_recorded_results_equal_the_farms(comparison: OracleComparison) -> None:
    found = compare(comparison, json.loads(comparison.recorded.read_text()))
    assert found.faults == []
    page = PAGE.read_text()
    (row,) = [line.split(" | ") for line in page.splitlines() if line.startswith(f"| `{comparison.name}` |")]
    counts = [len(comparison.cases()), found.equal, found.refused, found.known.total()]
    assert [int(cell.strip(" |")) for cell in row[2:]] == counts
    assert [reason for reason in found.known if reason not in page] == []
