# ruff: noqa: PTH104, PTH208
"""Size of a writable layer, however it was made."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.sandboxes.isolation.layer_size import size_of_few, usage_and_closed
from workers.sandboxes.remove_tree import remove

_MB = 1 << 20


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "state/upper").mkdir(parents=True)
    yield tmp_path / "state"
    # nested deeper than pytest's own cleanup can follow
    assert remove(tmp_path / "state")


def used(state: Path) -> tuple[int, int]:
    folder = os.open(state, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return usage_and_closed(folder)[:2]
    finally:
        os.close(folder)


def go_down(n: int, name: str = "d") -> int:
    """Make nested folders in the current one; return a descriptor of the last."""
    at = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(n):
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = below
    return at


def put(folder: int, name: str, size: int) -> None:
    descriptor = os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=folder)
    os.posix_fallocate(descriptor, 0, size)
    os.close(descriptor)


def test_allocated_space_counts_and_holes_do_not(state: Path) -> None:
    with (state / "upper/full").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 20 * _MB)
    with (state / "upper/sparse").open("wb") as file:
        file.truncate(1 << 40)
    n_bytes, n_files = used(state)
    assert 20 * _MB <= n_bytes < 21 * _MB
    assert n_files == 2


@pytest.mark.parametrize("depth", [1, 199, 200, 201, 301, 1500])
def test_folders_may_be_nested_deeply(depth: int, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(state / "upper")
    bottom = go_down(depth)
    put(bottom, "x", 2 * _MB)
    os.close(bottom)
    # after the deep folder, and next to it on the way
    put(os.open("d", os.O_RDONLY), "y", _MB)
    (state / "upper/a").mkdir()
    (state / "upper/a/z").write_bytes(b"x" * _MB)
    n_bytes, n_files = used(state)
    assert n_files == depth + 4
    assert 4 * _MB <= n_bytes <= 4 * _MB + (depth + 10) * 8192


def test_few_descriptors_are_open(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(state / "upper")
    os.close(go_down(500))
    before = len(os.listdir("/proc/self/fd"))
    assert used(state)[1] == 500
    assert len(os.listdir("/proc/self/fd")) == before


def test_empty_files_and_links_are_counted(state: Path) -> None:
    for n in range(300):
        (state / f"upper/{n}").touch()
        (state / f"upper/link{n}").symlink_to("x")
        os.link(state / f"upper/{n}", state / f"upper/hard{n}")
    os.mkfifo(state / "upper/fifo")
    assert used(state)[1] == 901


def test_link_is_not_followed(state: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/x").write_bytes(b"x" * _MB)
    (state / "upper/link").symlink_to(tmp_path / "outside")
    assert used(state)[0] < _MB


def test_moving_folders_do_not_stop_the_count(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted while another thread moves the folders; all files in the upper ones count every time."""
    monkeypatch.chdir(state / "upper")
    os.close(go_down(300))
    (state / "upper/big").write_bytes(b"x" * _MB)
    (state / "upper/e").mkdir()
    stop = threading.Event()

    def move() -> None:
        deep = "/".join("d" * 150)
        while not stop.is_set():
            os.rename(deep, "e/d")
            os.rename("e/d", deep)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        result = [used(state) for _ in range(10)]
    finally:
        stop.set()
        mover.join()
    assert min(n_bytes for n_bytes, _ in result) >= _MB
    # files that are met in both places count twice
    assert max(n_files for _, n_files in result) <= 2 * 302


def test_empty_layer_has_size_zero(tmp_path: Path) -> None:
    assert used(tmp_path) == (0, 0)


def test_few_files_are_counted_directly_with_the_same_result(state: Path) -> None:
    (state / "upper/a/b").mkdir(parents=True)
    (state / "upper/a/b/full").write_bytes(b"x" * _MB)
    (state / "upper/link").symlink_to("/")
    assert of_few(state) == used(state)
    assert used(state)[1] == 4


def test_many_files_are_left_to_a_child_process(state: Path) -> None:
    for number in range(150):
        (state / f"upper/{number}").touch()
    assert of_few(state) == used(state)
    (state / "upper/folder").mkdir()
    for number in range(150):
        (state / f"upper/folder/{number}").touch()
    assert of_few(state) is None


def test_unreadable_folder_is_left_to_a_child_process(state: Path) -> None:
    assert of_few(state) == (0, 0)
    (state / "upper").rename(state / "other")
    # a link, which is not followed: entering it as a folder is an error
    (state / "upper").symlink_to("other")
    assert of_few(state) is None


def of_few(state: Path) -> tuple[int, int] | None:
    before = len(os.listdir("/proc/self/fd"))
    folder = os.open(state, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return size_of_few(folder)
    finally:
        os.close(folder)
        assert len(os.listdir("/proc/self/fd")) == before
