"""Fingerprints of files and folders, without reading them each time."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from tests.services.farms import until
from workers.sandboxes.images.content_store import fingerprint


@pytest.fixture
def digests(tmp_path: Path) -> Path:
    return tmp_path / "digests"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep/file").write_text("a")
    (tree / "link").symlink_to("deep/file")
    return tree


def settle(*paths: Path) -> None:
    """Make the file look as if last written long ago, as far as possible."""
    for path in paths:
        os.utime(path, (1, 1), follow_symlinks=False)


def test_fingerprint_of_a_file_is_that_of_its_bytes(tmp_path: Path, digests: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    assert fingerprint(file, digests) == hashlib.sha256(b"abc").hexdigest()


def test_quick_change_of_equal_size_is_detected(tmp_path: Path, digests: Path) -> None:
    file = tmp_path / "file"
    seen = set()
    for byte in (b"a", b"b", b"c"):
        file.write_bytes(byte)
        settle(file)
        seen.add(fingerprint(file, digests))
    assert len(seen) == 3


def test_fingerprint_of_an_old_file_is_cached(tmp_path: Path, digests: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    result = fingerprint(file, digests)
    assert not digests.exists()
    # the time of the last change to a file cannot be set: the test has to wait
    until(lambda: fingerprint(file, digests) == result and digests.exists(), "it is remembered")
    assert [memo.read_text() for memo in digests.iterdir()] == [result]


@pytest.mark.parametrize("change", ["content", "name", "mode", "link", "more"])
def test_fingerprint_of_a_folder_covers_all_its_contents(tree: Path, change: str, digests: Path) -> None:
    before = fingerprint(tree, digests)
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
    assert fingerprint(tree, digests) != before


def test_times_and_locations_do_not_count(tree: Path, tmp_path: Path, digests: Path) -> None:
    shutil.copytree(tree, tmp_path / "copy", symlinks=True)
    settle(tree / "deep/file")
    assert fingerprint(tree, digests) == fingerprint(tmp_path / "copy", digests)


def test_links_count_as_their_targets_on_request(tree: Path, tmp_path: Path, digests: Path) -> None:
    (tmp_path / "outside").write_text("a")
    (tree / "out").symlink_to(tmp_path / "outside")
    (tree / "round").symlink_to(".")
    (tree / "nowhere").symlink_to("gone")
    before, before_followed = fingerprint(tree, digests), fingerprint(tree, digests, follow=True)
    (tmp_path / "outside").write_text("b")
    assert fingerprint(tree, digests) == before
    assert fingerprint(tree, digests, follow=True) != before_followed


def test_missing_file_is_an_error(tmp_path: Path, digests: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fingerprint(tmp_path / "gone", digests)
