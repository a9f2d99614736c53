"""Rows of a benchmark state if a target was reached, and keep the reference values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testkit.report import Report


def test_times_are_reported_as_percentiles_in_ms() -> None:
    report = Report("t")
    median = report.times("call", [number / 1000 for number in range(1, 101)], at_most=60, tmux=500.0)
    row = report.rows["call"]
    assert median == row["value"] == pytest.approx(50.5)
    assert (row["p95"], row["p99"], row["n"]) == (pytest.approx(96), pytest.approx(100), 100)
    assert (row["reached"], row["against"]) == (True, {"tmux": 500.0})


@pytest.mark.parametrize(("value", "reached"), [(2.0, True), (1.9, False)])
def test_value_of_at_least_the_minimum_reaches_the_target(value: float, reached: bool) -> None:
    report = Report("t")
    report.add("rate", value, "times", at_least=2)
    assert report.rows["rate"]["reached"] is reached


def test_missed_target_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = Report("t")
    report.add("left_over", 3, "", at_most=0, mounts=3)
    report.add("free", 1, "ms")
    report.show(tmp_path / "rows.json")
    shown = capsys.readouterr().out
    assert "≤ 0, missed" in shown
    assert "mounts 3" in shown
    assert json.loads((tmp_path / "rows.json").read_text()) == report.rows
