"""What is in a root file system, seen from outside: its links lead where they would for those who live in it."""

from __future__ import annotations

import os
from pathlib import Path

_MAX_LINKS = 40


def size_of(folder: Path) -> int:
    """What a tree takes on disk, in bytes; files with several names once."""
    counted: set[tuple[int, int]] = set()
    total = 0
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            found = Path(parent, name).lstat()
            if found.st_nlink == 1 or (found.st_dev, found.st_ino) not in counted:
                counted.add((found.st_dev, found.st_ino))
                total += found.st_blocks * 512
    return total


def has_bash(root: Path) -> bool:
    """Whether a root file system has a bash where one is looked for. Its links lead where they would inside."""
    return any(_inside(root, Path(folder, "bash")) for folder in ("bin", "usr/bin", "usr/local/bin"))


def _inside(root: Path, path: Path, n_links: int = 0) -> bool:
    """Whether a path, relative to a root, is that of a file below it."""
    found = root
    parts = list(path.parts)
    while parts:
        part = parts.pop(0)
        found = found.parent if part == ".." and found != root else found / part if part != ".." else root
        if found.is_symlink():
            target = found.readlink()
            base = Path() if target.is_absolute() else found.parent.relative_to(root)
            rest = Path(*target.parts[1:]) if target.is_absolute() else target
            return n_links < _MAX_LINKS and _inside(root, Path(base, rest, *parts), n_links + 1)
    return found.is_file()
