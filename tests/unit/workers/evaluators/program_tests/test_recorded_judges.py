"""The rules of programs agree with the recorded results of the reference scorers; `make test-oracles` runs those."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracles.judge_comparisons import ALL_RULES, REASONS, compare, recorded

PAGE = Path(__file__).parents[5] / "docs" / "reference" / "oracles.md"


@pytest.mark.parametrize("rule", ALL_RULES)
def test_recorded_results_equal_the_farms(rule: str) -> None:
    marks = recorded()[rule]
    found = compare(rule, marks)
    assert found.faults == []
    (row,) = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith(f"| `{rule}` |")]
    assert [int(cell.strip(" |")) for cell in row[2:]] == [len(marks), found.n_right, found.known.total()]
    assert len(marks) >= 300


def test_each_reason_explains_a_difference_and_is_on_the_page() -> None:
    used = {reason for rule, marks in recorded().items() for reason in compare(rule, marks).used}
    assert [reason for reason in REASONS if reason not in used] == []
    page = PAGE.read_text()
    assert [reason.reason for reason in REASONS if f"| {reason.reason} |" not in page] == []
