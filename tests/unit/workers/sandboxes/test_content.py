"""Folders that are made once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import pytest

from workers.sandboxes.content import digest, made_in_place, made_once

Making: TypeAlias = Callable[[Path, Callable[[Path], None]], Path]


def test_a_digest_is_of_all_its_parts() -> None:
    assert digest("a", 1) == digest("a", 1)
    assert len({digest("a", 1), digest("a", 2), digest("a1"), digest("a", "1"), digest(["a", 1])}) == 5


@pytest.mark.parametrize("making", [made_once, made_in_place])
def test_many_want_it_and_one_makes_it(making: Making, tmp_path: Path) -> None:
    made: list[int] = []
    together = threading.Barrier(8)

    def make(folder: Path) -> None:
        made.append(1)
        folder.mkdir(exist_ok=True)
        (folder / "file").write_text("x")

    def want(_: int) -> str:
        together.wait()
        return (making(tmp_path / "cache/folder", make) / "file").read_text()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(want, range(8))) == ["x"] * 8
    assert made == [1]


@pytest.mark.parametrize("making", [made_once, made_in_place])
def test_one_that_fails_is_made_again(making: Making, tmp_path: Path) -> None:
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
    making(folder, make)
    assert (folder / "whole").exists()
    assert not (folder / "half").exists()
