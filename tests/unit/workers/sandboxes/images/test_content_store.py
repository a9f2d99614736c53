"""Folders that are built once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import pytest

from workers.sandboxes.images.content_store import digest, made_in_place, made_once

Making: TypeAlias = Callable[[Path, Callable[[Path], None]], Path]


def test_digest_covers_all_its_parts() -> None:
    assert digest("a", 1) == digest("a", 1)
    assert len({digest("a", 1), digest("a", 2), digest("a1"), digest("a", "1"), digest(["a", 1])}) == 5


@pytest.mark.parametrize("making", [made_once, made_in_place])
def test_concurrent_requests_build_once(making: Making, tmp_path: Path) -> None:
    made: list[int] = []
    together = threading.Barrier(8)

    def make(folder: Path) -> None:
        made.append(1)
        folder.mkdir(exist_ok=True)
        (folder / "file").write_text("x")

    def read_folder(_: int) -> str:
        together.wait()
        return (making(tmp_path / "cache/folder", make) / "file").read_text()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read_folder, range(8))) == ["x"] * 8
    assert made == [1]


@pytest.mark.parametrize("making", [made_once, made_in_place])
def test_failed_build_is_repeated(making: Making, tmp_path: Path) -> None:
    folder = tmp_path / "folder"

    def fail(target: Path) -> None:
        target.mkdir(exist_ok=True)
        (target / "half").touch()
        raise OSError("full")

    def make(target: Path) -> None:
        target.mkdir(exist_ok=True)
        (target / "whole").touch()

    with pytest.raises(OSError, match="full"):
        making(folder, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.lock"]
    making(folder, make)
    assert (folder / "whole").exists()
    assert not (folder / "half").exists()


@pytest.mark.parametrize("making", [made_once, made_in_place])
def test_result_is_readable_by_all_with_any_umask(making: Making, tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "deep").mkdir(parents=True)
        (folder / "deep/file").write_text("x")
        (folder / "deep/program").write_text("x")
        (folder / "deep/program").chmod(0o700)

    mask = os.umask(0o077)
    try:
        folder = making(tmp_path / "folder", make)
    finally:
        os.umask(mask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*")) if path.name[0] != "."}
    assert modes == {"folder": 0o755, "deep": 0o755, "file": 0o644, "program": 0o755}


def test_bad_result_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "folder"

    def make(target: Path) -> None:
        (target / "file").write_text("new")

    def good(found: Path) -> bool:
        return (found / "file").exists() and (found / "file").read_text() == "new"

    folder.mkdir()
    (folder / "file").write_text("old")
    assert made_once(folder, make, good) == folder
    assert (folder / "file").read_text() == "new"
    aside = next(tmp_path.glob("folder.old.*"))
    assert (aside / "file").read_text() == "old"


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    old, young = tmp_path / "folder.alone.old", tmp_path / "folder.alone.young"
    for left in (tmp_path / "folder.new.x", old, young, tmp_path / "folder2.new.x"):
        (left / "deep").mkdir(parents=True)
        (left / "deep").chmod(0o500)
    os.utime(old, (1, 1))
    made_once(tmp_path / "folder", lambda folder: None)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "folder",
        "folder.alone.young",
        "folder2.new.x",
    ]


def test_slower_process_uses_the_existing_result(tmp_path: Path) -> None:
    """As may happen without locks."""
    folder = tmp_path / "folder"

    def make(target: Path) -> None:
        folder.mkdir()
        (folder / "file").write_text("of the other")

    assert (made_once(folder, make) / "file").read_text() == "of the other"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "folder.lock"]
