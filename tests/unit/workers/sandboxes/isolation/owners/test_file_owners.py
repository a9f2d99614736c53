"""The owners that are recorded on files of a layer, written by one user's programs over those of others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import absent
from workers.sandboxes.isolation.owners.file_owners import (
    ATTRIBUTE,
    MARK,
    has_owners,
    note_owner,
    owner_of,
    settle,
)

SAME = 0xFFFFFFFF


@pytest.fixture
def layers(tmp_path: Path) -> tuple[Path, Path]:
    """Return an upper and a lower layer, on a file system that keeps attributes."""
    for name in ("upper", "lower"):
        (tmp_path / name).mkdir()
    try:
        os.setxattr(tmp_path, "user.tried", b"")
    except OSError as error:
        absent(f"no attributes of files below {tmp_path}: {error}")
    return tmp_path / "upper", tmp_path / "lower"


def noted(layer: Path, name: str) -> tuple[int, int] | None:
    return owner_of(str(layer / name))


def test_owner_is_recorded_in_parts_and_removed_for_root(layers: tuple[Path, Path]) -> None:
    upper, _ = layers
    path = str(upper / "file")
    Path(path).touch()
    with Path(path).open("r+b") as file:
        note_owner(file.fileno(), 5, 6, str(upper))
        assert owner_of(path) == owner_of(file.fileno()) == (5, 6)
        note_owner(file.fileno(), 0, 0, str(upper))
    os.removexattr(upper, MARK)
    note_owner(path, 0, 0, str(upper))
    assert (owner_of(path), has_owners([str(upper)])) == (None, False)
    note_owner(path, 5, SAME, str(upper))
    note_owner(path, SAME, 6, str(upper))
    assert (owner_of(path), has_owners(["/none", str(upper)])) == ((5, 6), True)
    note_owner(path, 0, 0, str(upper))
    assert owner_of(path) is None
    os.setxattr(path, ATTRIBUTE, b"no numbers")
    assert owner_of(path) is None


def test_files_that_cannot_have_an_owner_are_skipped_and_missing_ones_are_errors(layers: tuple[Path, Path]) -> None:
    upper, _ = layers
    (upper / "link").symlink_to("nowhere")
    os.mkfifo(upper / "fifo")
    for name in ("link", "fifo"):
        note_owner(str(upper / name), 5, 5, str(upper))
        assert noted(upper, name) is None
    with pytest.raises(FileNotFoundError):
        note_owner(str(upper / "none"), 5, 5, str(upper))


def test_new_files_are_the_users_and_existing_ones_keep_their_owner(layers: tuple[Path, Path]) -> None:
    upper, lower = layers
    for layer in layers:
        (layer / "folder").mkdir()
        for name in ("of_root", "of_7", "folder/of_7"):
            (layer / name).touch()
    for name in ("of_7", "folder/of_7", "folder"):
        os.setxattr(lower / name, ATTRIBUTE, b"7:7")
    (upper / "new").touch()
    (upper / "folder/new").touch()
    (upper / "link").symlink_to(lower)
    for name in ("of_root", "new", "folder"):
        os.setxattr(upper / name, ATTRIBUTE, b"9:9")
    settle(str(upper), [1500, 1600], ["/none", str(lower)])
    user = (1500, 1600)
    assert {name: noted(upper, name) for name in ("new", "folder/new", "folder", "of_root", "of_7", "folder/of_7")} == {
        "new": user,
        "folder/new": user,
        "folder": (7, 7),
        "of_root": None,
        "of_7": (7, 7),
        "folder/of_7": (7, 7),
    }
    assert os.getxattr(upper, MARK) == b"1"
    assert (noted(lower, "of_root"), noted(lower, "of_7")) == (None, (7, 7))
