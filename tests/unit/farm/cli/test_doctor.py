"""Findings of `farm doctor` about the store and the farm's control group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from farm.cli.doctor import _cgroup, examine, store_and_broker
from farm.cli.main import main
from farm.cli.readiness import CheckResult
from farm.settings import Settings
from farm.store.database import Store
from tests.services.entry_points import installed


def test_control_group_is_optional() -> None:
    check_result = _cgroup(Settings(cgroup=None))
    assert check_result.ok
    assert "FARM_CGROUP" in check_result.detail


@pytest.mark.parametrize(
    ("file", "text", "ok", "detail"),
    [
        ("cgroup.controllers", "cpu memory pids\n", True, "version 2"),
        ("cgroup.controllers", "cpu pids\n", False, "no memory controller"),
        ("memory.limit_in_bytes", "1\n", True, "version 1"),
        ("readme", "", False, "is not a control group"),
    ],
)
def test_control_group_needs_the_memory_controller(tmp_path: Path, file: str, text: str, ok: bool, detail: str) -> None:
    (tmp_path / file).write_text(text)
    check_result = _cgroup(Settings(cgroup=tmp_path))
    assert check_result.ok is ok
    assert detail in check_result.detail
    assert "FARM_CGROUP" in check_result.remedy


def stores(tmp_path: Path, store_url: str = "") -> list[CheckResult]:
    options = Settings(home=tmp_path / "home", store_url=store_url, scratch=tmp_path)
    result = {"farm", "store", "clock", "engines", "nodes"}
    return [each for each in examine(options, *store_and_broker(options)) if each.what in result]


def test_store_is_not_needed_before_the_first_farm(tmp_path: Path) -> None:
    (check_result,) = stores(tmp_path)
    assert (check_result.ok, check_result.needed) == (False, False)
    assert (check_result.detail, check_result.remedy) == (
        f"no farm yet in {tmp_path / 'home'}",
        "`farm up` creates one",
    )
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("url", "detail"),
    [
        ("sqlite:///{tmp}/none.db", "there is no file {tmp}/none.db"),
        ("sqlite:///{tmp}/text.db", "file is not a database"),
        ("postgresql://u:secret@127.0.0.1:9/d", "the database does not answer: connection failed"),
        ("mysql://h/d", "mysql is neither sqlite nor postgresql"),
        ("nonsense", "not a database URL"),
    ],
)
def test_unreachable_store_is_one_finding_without_sql(tmp_path: Path, url: str, detail: str) -> None:
    (tmp_path / "text.db").write_text("hello, this is no database\n" * 100)
    (check_result,) = stores(tmp_path, url.format(tmp=tmp_path))
    assert (check_result.what, check_result.ok, check_result.needed) == ("store", False, True)
    assert detail.format(tmp=tmp_path) in check_result.detail
    assert "\n" not in check_result.detail
    for word in ("SELECT", "PRAGMA", "secret"):
        assert word not in check_result.detail + check_result.remedy
    assert not (tmp_path / "none.db").exists(), "the check creates nothing"


def test_without_nodes_and_engines_neither_is_ok(sqlite_store: Store, tmp_path: Path) -> None:
    result = {each.what: each for each in stores(tmp_path, sqlite_store.url)}
    assert [name for name, each in result.items() if each.ok] == ["store", "clock"]
    assert (result["engines"].detail, result["nodes"].detail) == ("none is added", "none runs")


def test_stopped_farm_of_this_machine_is_not_broken(sqlite_store: Store, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    address = {"store_url": sqlite_store.url, "broker_url": f"redis+socket://{tmp_path}/gone.sock"}
    (home / "address.json").write_text(json.dumps(address))
    options = Settings(home=home, scratch=tmp_path)
    result = {each.what: each for each in examine(options, *store_and_broker(options))}
    assert (result["redis"].ok, result["redis"].needed) == (False, False)
    assert (result["redis"].detail, result["redis"].remedy) == ("the farm here is not running", "`farm up` starts it")
    elsewhere = Settings(home=home, scratch=tmp_path, broker_url="redis://127.0.0.1:9/0")
    result = {each.what: each for each in examine(elsewhere, sqlite_store.url, elsewhere.broker_url)}
    assert (result["redis"].ok, result["redis"].needed) == (False, True)


FORGETFUL = """
class Forgetful:
    rows_per_rollout = "every"
    def __call__(self, rollouts, /, *, min_version=None):
        return []
    def read(self, rows, /):
        return rows
rows = Forgetful()
"""


def test_doctor_checks_the_promises_of_an_adapter(tmp_path: Path) -> None:
    kept = CliRunner().invoke(main, ["doctor", "--adapter", "trl"])
    assert kept.exit_code == 0, kept.output
    assert kept.output.count("ok  ") == 10
    project, site = tmp_path / "project", tmp_path / "site"
    project.mkdir()
    (project / "forgetful_rows.py").write_text(FORGETFUL)
    points = '[project.entry-points."farm.adapters"]\nforgetful = "forgetful_rows:rows"\n'
    (project / "pyproject.toml").write_text(f'[project]\nname = "forgetful"\nversion = "1"\n{points}')
    with installed(project, site):
        broken = CliRunner().invoke(main, ["doctor", "--adapter", "forgetful"])
    assert broken.exit_code == 1
    assert "bad" in broken.output
    assert "there are 0 rows, but 9 may train" in broken.output
    assert "installed: arrays," in CliRunner().invoke(main, ["doctor", "--adapter", "none-such"]).output
    # an adapter that returns results, whose trainer is not installed here
    absent = CliRunner().invoke(main, ["doctor", "--adapter", "rllm"])
    assert absent.exit_code
    assert "adapter rllm needs its trainer's package in this Python: No module named 'rllm'" in absent.output
