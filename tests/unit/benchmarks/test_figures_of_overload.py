"""The benchmarks of overload, durability and recovery can be started, and what they measure with measures."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import durability, overload, recovery
from benchmarks.overload import Sizes, rounds, submitting
from benchmarks.processes import forget_peak, peak_mb
from benchmarks.report import Report
from farm.store import migrations
from farm.store.engine import Store


@pytest.mark.parametrize("benchmark", [overload, durability, recovery])
def test_it_says_what_it_measures(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--help"])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 0
    assert "--quick" in capsys.readouterr().out


def test_submits_and_rounds_are_rows_beside_their_peers(tmp_path: Path) -> None:
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


def test_the_peak_of_memory_is_that_since_it_was_forgotten() -> None:
    me = os.getpid()
    forget_peak(me)
    before = peak_mb(me)
    block = bytearray(os.urandom(1) * 60_000_000)
    assert peak_mb(me) > before + 40
    del block
    forget_peak(me)
    assert peak_mb(me) < before + 40
