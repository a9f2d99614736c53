"""Fingerprints of files and folders, without reading them each time."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.sandboxes.sandbox_kinds import farm_in
from tests.services.farms import until
from workers.sandboxes.images.fingerprints import fingerprint, folder


@pytest.fixture(autouse=True)
def _home(tmp_path: Path) -> Iterator[None]:
    with farm_in(tmp_path / "farm"):
        yield


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep/file").write_text("a")
    (tree / "link").symlink_to("deep/file")
    return tree


def settle(*paths: Path) -> None:
    """Look as if last written long ago, as far as one can."""
    for path in paths:
        os.utime(path, (1, 1), follow_symlinks=False)


def test_a_file_is_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    assert fingerprint(file) == hashlib.sha256(b"abc").hexdigest()


def test_the_same_size_and_time_at_once_is_no_trap(tmp_path: Path) -> None:
    file = tmp_path / "file"
    seen = set()
    for byte in (b"a", b"b", b"c"):
        file.write_bytes(byte)
        settle(file)
        seen.add(fingerprint(file))
    assert len(seen) == 3


def test_what_has_settled_is_remembered(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    result = fingerprint(file)
    assert not folder().exists()
    # the time of the last change to a file cannot be set: it must pass
    until(lambda: fingerprint(file) == result and folder().exists(), "it is remembered")
    assert [memo.read_text() for memo in folder().iterdir()] == [result]


@pytest.mark.parametrize("change", ["content", "name", "mode", "link", "more"])
def test_a_folder_is_all_that_is_in_it(tree: Path, change: str) -> None:
    before = fingerprint(tree)
    match change:
        case "content":
            (tree / "deep/file").write_text("b")
        case "name":
            (tree / "deep/file").rename(tree / "deep/other")
        case "mode":
            (tree / "deep/file").chmod(0o700)
        case "link":
            (tree / "link").unlink()
            (tree / "link").symlink_to("deep")
        case "more":
            (tree / "empty").mkdir()
    assert fingerprint(tree) != before


def test_times_and_places_do_not_count(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "copy", symlinks=True)
    settle(tree / "deep/file")
    assert fingerprint(tree) == fingerprint(tmp_path / "copy")


def test_links_count_as_what_they_lead_to_if_asked(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("a")
    (tree / "out").symlink_to(tmp_path / "outside")
    (tree / "round").symlink_to(".")
    (tree / "nowhere").symlink_to("gone")
    before, before_followed = fingerprint(tree), fingerprint(tree, follow=True)
    (tmp_path / "outside").write_text("b")
    assert fingerprint(tree) == before
    assert fingerprint(tree, follow=True) != before_followed


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fingerprint(tmp_path / "gone")
