"""The benchmarks of overload, durability and recovery start, and their measurements work."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import durability, overload, recovery
from benchmarks.overload import Sizes, rounds, submitting
from farm.store import migrations
from farm.store.database import Store
from testkit.report import Report


@pytest.mark.parametrize("benchmark", [overload, durability, recovery])
def test_it_says_what_it_measures(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--help"])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 0
    assert "--quick" in capsys.readouterr().out


def test_submits_and_rounds_are_rows_with_their_peers(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/farm.db"
    store = Store(url)
    migrations.migrate(store)
    report = Report("t")
    sizes = Sizes(many=400, rated=0, few=0, repeats=0, small=0, clients=0)
    submitting(report, "sqlite", url, sizes)
    rounds(report, "sqlite", store, url, sizes)
    store.close()
    assert report.rows["sqlite_submit"]["value"] > 0
    assert report.rows["sqlite_submit"]["aim"] == {"at_least": 2000}
    assert report.rows["sqlite_round"]["against"]["with_200_waiting"] > 0
