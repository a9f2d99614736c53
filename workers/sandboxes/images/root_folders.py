"""Examine root file systems from outside, with links resolved as inside."""

from __future__ import annotations

import os
from pathlib import Path

_MAX_LINKS = 40


def size_of(folder: Path) -> int:
    """Return the disk space of a tree in bytes; hard links count once."""
    counted: set[tuple[int, int]] = set()
    total = 0
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            result = Path(parent, name).lstat()
            if result.st_nlink == 1 or (result.st_dev, result.st_ino) not in counted:
                counted.add((result.st_dev, result.st_ino))
                total += result.st_blocks * 512
    return total


def has_bash(root: Path) -> bool:
    """Return whether a root file system has a bash in a usual folder, with links resolved as inside."""
    return any(_inside(root, Path(folder, "bash")) for folder in ("bin", "usr/bin", "usr/local/bin"))


def _inside(root: Path, path: Path, n_links: int = 0) -> bool:
    """Return whether a path relative to a root is a file below it."""
    result = root
    parts = list(path.parts)
    while parts:
        part = parts.pop(0)
        result = result.parent if part == ".." and result != root else result / part if part != ".." else root
        if result.is_symlink():
            target = result.readlink()
            base = Path() if target.is_absolute() else result.parent.relative_to(root)
            rest = Path(*target.parts[1:]) if target.is_absolute() else target
            return n_links < _MAX_LINKS and _inside(root, Path(base, rest, *parts), n_links + 1)
    return result.is_file()
