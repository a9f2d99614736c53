"""Root file systems as seen from outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workers.sandboxes.images.image_cache import has_bash, size_of


@pytest.mark.parametrize(
    ("links", "has"),
    [
        ({"bin": "usr/bin"}, True),
        ({"bin": "/usr/bin"}, True),
        ({"bin": "../../../usr/bin"}, True),
        ({"bin": "bin"}, False),
        ({"bin": "gone"}, False),
        ({"bin/bash": "../usr/bin/../lib/bash"}, False),
        ({}, False),
    ],
)
def test_link_is_resolved_within_the_root(tmp_path: Path, links: dict[str, str], has: bool) -> None:
    root = tmp_path / "root"
    # not in the place that is searched, unless a link leads there
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/bash").touch()
    moved = root / "usr/local/opt"
    moved.mkdir(parents=True)
    (root / "usr/bin").rename(moved / "bin")
    for name, target in links.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target.replace("usr/bin", "usr/local/opt/bin"))
    assert has_bash(root) is has


def test_link_to_the_nodes_own_bash_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "bin").symlink_to("/usr/bin")
    assert Path("/usr/bin/bash").exists()
    assert not has_bash(tmp_path)


def test_hard_linked_files_count_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(256)) * 400)
    alone = size_of(tmp_path)
    assert alone >= 100_000
    os.link(tmp_path / "a", tmp_path / "b")
    assert size_of(tmp_path) == alone
