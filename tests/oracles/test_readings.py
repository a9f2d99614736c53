"""The farm reads and refuses the same tasks as Harbor and terminal-bench, except as listed in `comparisons.py`."""

from __future__ import annotations

import json

import pytest

from tests.oracles.comparisons import COMPARISONS, OracleComparison, compare, query_oracle


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.name)
def test_results_of_the_oracle_equal_the_farms(comparison: OracleComparison) -> None:
    answers = query_oracle(comparison)
    assert compare(comparison, answers).faults == []
    recorded = json.loads(comparison.recorded.read_text())
    assert answers == recorded, "python -m tests.oracles.record DIR records the oracle's new results"
