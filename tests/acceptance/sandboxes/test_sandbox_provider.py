"""Third-party kinds of sandbox, installed as packages: they keep promises, and `auto` chooses by priority."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import farm
from farm.records.rollout import State
from tests.services.farms import embedded, farm_folder, left_of
from tests.services.unruly import installed_in

ROOT = Path(__file__).parents[3]
KINDS = """
class Ranked:
    def __init__(self, priority, missing=""):
        self.priority, self._missing = priority, missing

    def missing(self):
        return self._missing

class Raising(Ranked):
    def missing(self):
        raise RuntimeError("cannot be asked")

first = lambda: Ranked(1000)
second = lambda: Ranked(999)
absent = lambda: Ranked(2000, "there is no such hardware")
raising = lambda: Raising(3000)
by_name = lambda: Ranked(-1)
odd = lambda: Ranked("high")
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder where the example was built and installed by its own pyproject.toml."""
    site = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--target", str(site)]
    project = str(ROOT / "examples/sandbox_provider")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, project], check=True)
    return site


def python(words: list[str], *sites: Path) -> subprocess.CompletedProcess[str]:
    """Run Python where these folders are installed."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*sites, ROOT)))}
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=900)


def chosen_kind(*sites: Path) -> subprocess.CompletedProcess[str]:
    return python(["-c", "from workers.plugins.registry import best_sandbox; print(best_sandbox())"], *sites)


def test_example_passes_conformance_group_surface(plain: Path) -> None:
    result = python(["-m", "workers.conformance", "plain", "--group", "surface"], plain)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 broken" in result.stdout


def test_example_is_reported_as_not_isolating(plain: Path) -> None:
    result = python(["-m", "workers.conformance", "plain", "--only", "there_is_no_network"], plain)
    assert result.returncode == 1
    assert "it was not tried: commands see files of the node" in " ".join(result.stdout.split())


def test_provider_with_negative_priority_is_not_chosen(plain: Path) -> None:
    result = chosen_kind(plain)
    assert result.stdout.strip() in {"singularity", "namespace"} or "no sandbox can run on this node" in result.stderr
    assert "plain" not in result.stdout + result.stderr


def test_usable_provider_of_the_highest_priority_is_chosen(tmp_path: Path) -> None:
    names = ("first", "second", "absent", "raising", "by_name", "odd", "not_there")
    (tmp_path / "ranked_kinds.py").write_text(KINDS)
    (tmp_path / "ranked-1.dist-info").mkdir()
    (tmp_path / "ranked-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: ranked\nVersion: 1\n")
    points = "".join(f"{name} = ranked_kinds:{name}\n" for name in names)
    (tmp_path / "ranked-1.dist-info/entry_points.txt").write_text(f"[farm.sandboxes]\n{points}")
    result = chosen_kind(tmp_path)
    assert result.stdout == "first\n", result.stderr
    assert "Sandbox plug-in odd cannot be loaded: ValueError" in result.stderr
    assert "has no attribute 'not_there'" in result.stderr


@pytest.fixture
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


def test_rollouts_run_in_the_example(plain: Path, folder: Path) -> None:
    env: dict[str, Any] = installed_in(folder)
    env["PYTHONPATH"] = f"{plain}{os.pathsep}{env['PYTHONPATH']}"
    instance = {"data_source": "unruly", "fields": {"where": "host", "seconds": 0.1}}
    with (
        embedded(folder, FARM_SANDBOX="plain", **env) as here,
        farm.connect(here.store_url, broker_url=here.broker_url) as client,
    ):
        result = client.collect(client.submit({"instances": [instance] * 4}), timeout_s=600)
        assert [(rollout.state, rollout.reward) for rollout in result] == [(State.COMPLETED, 1.0)] * 4, result
        assert not [*(folder / "scratch").glob("*/plain/*")]
    assert left_of(folder) == []
