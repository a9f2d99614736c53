"""Limits of the cache for environments, programs and archives: age and size; entries in use or named are kept."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farm.errors import SandboxError
from farm.records.sandbox_spec import AgentProgram
from farm.settings import Settings, settings
from testkit.scratch_folder import sandbox_config
from workers.config import SandboxConfig
from workers.node.node_cleanup import CacheKeeper
from workers.sandboxes.agent_programs.brought_programs import brought
from workers.sandboxes.images.content_store import use_mark
from workers.sandboxes.images.image import set_alias
from workers.sandboxes.images.image_cache import cached_parts, held
from workers.sandboxes.images.image_pruning import everything, prune, prune_by_itself

DAY_S = 86_400.0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FARM_HOME", str(tmp_path / "home"))
    settings.cache_clear()
    yield tmp_path / "home"
    monkeypatch.undo()
    settings.cache_clear()


def program(folder: Path, name: str, n_bytes: int = 100_000, days: float = 0.0) -> Path:
    """Return a program of an agent in the cache that was last used some days ago."""
    source = folder / name
    source.mkdir(exist_ok=True)
    (source / "run").write_bytes(name.encode() * (n_bytes // len(name)))
    (root,) = brought(sandbox_config(), [AgentProgram(name=name, kind="folder", source=str(source))]).roots
    at = time.time() - days * DAY_S
    os.utime(use_mark(root), (at, at))
    return root


def age(root: Path, days: float) -> None:
    at = time.time() - days * DAY_S
    os.utime(use_mark(root), (at, at))


def test_old_entries_are_removed_and_used_ones_are_kept(home: Path, tmp_path: Path, config: SandboxConfig) -> None:
    old, young, in_use = (program(tmp_path, name, days=days) for name, days in (("a", 40), ("b", 20), ("c", 40)))
    with held(config, in_use):
        done = prune_by_itself(config, 30 * DAY_S, 0)
        assert {each.entry.folder: each.kept for each in done} == {old: "", in_use: "a sandbox uses it"}
    assert (old.exists(), young.exists(), in_use.exists()) == (False, True, True)
    with (
        pytest.raises(SandboxError, match=f"programs/{old.name} has just been removed from the cache"),
        held(config, old),
    ):
        pass
    assert [path.name for path in old.parent.iterdir() if old.name in path.name] == [f"{old.name}.lock"]
    assert program(tmp_path, "a") == old, "it is made again on demand"
    assert prune_by_itself(config, 0.0, 0) == [], "0 means no limit"


def test_least_recently_used_are_removed_first(home: Path, tmp_path: Path, config: SandboxConfig) -> None:
    roots = [program(tmp_path, name, days=days) for name, days in (("a", 9), ("b", 7), ("c", 8))]
    sizes = {each.folder: each.card.n_bytes for each in cached_parts(config)}
    assert set(sizes) == set(roots)
    prune_by_itself(config, 0.0, sizes[roots[1]] + sizes[roots[2]])
    assert [root.exists() for root in roots] == [False, True, True]
    age(roots[2], 0.5)
    kept = {each.entry.folder: each.kept for each in prune_by_itself(config, 0.0, 1)}
    assert kept[roots[1]] == ""
    assert kept[roots[2]].startswith("used "), "another node may have"
    assert [root.exists() for root in roots] == [False, False, True]


def test_partially_removed_entries_are_removed_by_the_next_run(
    home: Path, tmp_path: Path, config: SandboxConfig
) -> None:
    root = program(tmp_path, "a", days=9)
    aside = root.with_name(f"{root.name}.old.0123")
    use_mark(root).unlink()
    root.rename(aside)
    prune(config, [])
    assert not aside.exists()


def test_image_with_an_alias_or_a_lock_is_kept(home: Path, tmp_path: Path, config: SandboxConfig) -> None:
    card = '{"key": "%s", "n_bytes": 1, "built_at": 1.0, "build_s": 1.0, "mode": "lock", "node": "n"}'
    keys = ["aaaa", "bbbb", "cccc"]
    for key in keys:
        (config.images_folder / key / "root").mkdir(parents=True)
        (config.images_folder / key / "lock").touch()
        (config.images_folder / key / "image.json").write_text(card % key)
    (config.images_folder / "pins").mkdir()
    (config.images_folder / "pins" / "x").write_text("aaaa")
    set_alias(config, "ubuntu:24.04", "cached:bb")
    assert len(everything(config)) == 3
    CacheKeeper(Settings(keep_cache_days=1.0)).prune()
    assert [(config.images_folder / key).exists() for key in keys] == [True, True, False]
