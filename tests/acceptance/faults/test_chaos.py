"""The chaos run itself, short and with a fixed seed: faults of many kinds, and every promise kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farm.launch.head import postgres_binaries
from tests.conftest import absent
from tests.services.farms import until
from tests.services.soak import SOAK_MINUTES, at_length, repeats

SEED = os.environ.get("FARM_TEST_SEED", "5")
ROOT = Path(__file__).parents[3]
SMALLEST = ("--nodes", "1", "--engines", "1", "--clients", "1", "--store", "sqlite", "--latency", "0.2")
SMALL = ("--nodes", "2", "--engines", "2", "--clients", "2", "--lease", "4", "--latency", "0.3")


@pytest.fixture(scope="module", autouse=True)
def _there_is_a_postgres() -> None:
    if postgres_binaries() is None:
        absent("no Postgres: install the pgserver wheel (make venv) or Debian's postgresql")


def command(tmp_path: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "tests.chaos", *SMALL, "--json", str(tmp_path / "report.json"), *words]


@pytest.mark.soak
def test_chaos_run_breaks_no_promise(tmp_path: Path) -> None:
    n_faults = repeats(7, 20)
    length = ("--minutes", f"{max(2.0, SOAK_MINUTES):g}", "--pace", at_length("1", "3"), "--faults", str(n_faults))
    words = command(tmp_path, "--seed", SEED, *length, "--settle", at_length("180", "600"))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    struck = [fault for fault in report["faults"] if fault["target"] is not None]
    assert len(struck) >= n_faults * 2 // 3
    assert (report["broken"], report["leftovers"]) == ([], [])
    assert report["figures"]["rollouts_run"]["value"] > 10


@pytest.mark.soak
def test_interrupted_chaos_run_cleans_up_and_reports(tmp_path: Path) -> None:
    size = at_length(SMALLEST, ("--nodes", "1", "--engines", "1"))
    words = command(tmp_path, "--minutes", "30", "--pace", "2", "--settle", "180", *size)
    output = tmp_path / "said"
    with output.open("wb") as log:
        run = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
    try:
        until(lambda: ":" in output.read_text().partition("load")[2], output.read_text, 180)
        run.send_signal(signal.SIGINT)
        assert run.wait(600) == 0, output.read_text()[-6000:]
    finally:
        run.kill()
        run.wait()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["about"]["interrupted"]
    assert report["leftovers"] == []
