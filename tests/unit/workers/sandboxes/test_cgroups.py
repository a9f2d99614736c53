"""Control groups by the names and contents of their files, which are ordinary files here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from farm.errors import SandboxError
from farm.settings import settings
from testkit.scratch_folder import sandbox_config
from workers.sandboxes import cgroups


@pytest.fixture
def configured_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder that FARM_CGROUP names."""
    folder = tmp_path / "given"
    folder.mkdir()
    monkeypatch.setenv("FARM_CGROUP", str(folder))
    monkeypatch.setenv("FARM_SCRATCH", str(tmp_path / "scratch"))
    (tmp_path / "scratch/sandboxes").mkdir(parents=True)
    settings.cache_clear()
    yield folder
    settings.cache_clear()


def as_v2(folder: Path, controllers: str) -> None:
    (folder / "cgroup.controllers").write_text(controllers)
    (folder / "cgroup.subtree_control").write_text("")


def test_control_groups_are_optional(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FARM_CGROUP", raising=False)
    settings.cache_clear()
    assert cgroups.missing(sandbox_config()) == ""
    assert cgroups.make(sandbox_config(), tmp_path, 100, 10) == ""
    assert cgroups.of(tmp_path) == ""


@pytest.mark.parametrize(
    ("controllers", "complaint"),
    [(None, "is neither a control group"), ("cpu pids", "the memory controller is not delegated")],
)
def test_configured_group_needs_the_memory_controller(
    configured_cgroup: Path, controllers: str | None, complaint: str
) -> None:
    config = sandbox_config()
    if controllers is not None:
        as_v2(configured_cgroup, controllers)
    assert complaint in cgroups.missing(config)
    state = settings().scratch / "sandboxes/one"
    state.mkdir()
    with pytest.raises(SandboxError, match=complaint):
        cgroups.make(config, state, 100, 10)


def test_missing_folder_is_reported(configured_cgroup: Path) -> None:
    configured_cgroup.rmdir()
    assert "FARM_CGROUP" in cgroups.missing(sandbox_config())


def test_controllers_are_passed_down(configured_cgroup: Path) -> None:
    as_v2(configured_cgroup, "cpu io memory pids")
    # the kernel creates these with the folder
    parent = configured_cgroup / cgroups._name(settings().scratch.absolute() / "sandboxes")
    parent.mkdir()
    as_v2(parent, "memory")
    state = settings().scratch / "sandboxes/.ready.key.one"
    state.mkdir()
    group = Path(cgroups.make(sandbox_config(), state, 100, 10))
    assert (configured_cgroup / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    assert (parent / "cgroup.subtree_control").read_text() == "+memory"
    assert group.parent == parent
    assert cgroups.of(state) == str(group)


@pytest.mark.parametrize(
    ("version", "events"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 812\noom 4\noom_kill 3\noom_group_kill 0\n"),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
    ],
)
def test_number_of_kills_is_read(tmp_path: Path, version: str, events: str) -> None:
    (tmp_path / version).write_text(events)
    assert cgroups.n_killed(str(tmp_path)) == 3
    assert cgroups.n_killed(str(tmp_path / "gone")) == 0


@pytest.mark.parametrize(
    ("is_v2", "written"),
    [
        (True, {"memory.max": "104857600", "memory.swap.max": "0", "pids.max": "74"}),
        (False, {"memory.limit_in_bytes": "104857600", "memory.memsw.limit_in_bytes": "104857600"}),
    ],
)
def test_limits_are_written(tmp_path: Path, is_v2: bool, written: dict[str, str]) -> None:
    if is_v2:
        as_v2(tmp_path, "memory pids")
    before = {path.name for path in tmp_path.iterdir()}
    cgroups._limit(tmp_path, 100, 10)
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.name not in before} == written
    assert cgroups.memory_mb(str(tmp_path)) == 100


def test_groups_without_a_sandbox_are_removed(configured_cgroup: Path) -> None:
    config = sandbox_config()
    (configured_cgroup / "memory.limit_in_bytes").touch()
    states = settings().scratch.absolute() / "sandboxes"
    parent = configured_cgroup / cgroups._name(states)
    for name in ("wanted", "left"):
        (parent / name).mkdir(parents=True)
    (states / "one").mkdir()
    (states / "one" / cgroups.LINK).symlink_to(parent / "wanted")
    cgroups.sweep(config, states)
    assert [path.name for path in parent.iterdir()] == ["wanted"]
    (states / "one" / cgroups.LINK).unlink()
    cgroups.sweep(config, states, all_of_it=True)
    assert not parent.exists()
