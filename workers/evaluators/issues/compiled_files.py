"""Digests and copies of a build's compiled files; sent into sandboxes as text, it imports nothing of the farm.

Compiled files are ELF libraries and programs: those in the tree that git does not track, and those in the other folders
that Python searches, if newer than a mark.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_MAGIC = b"\x7fELF"


def compiled_files(tree: Path, mark: Path) -> dict[str, str]:
    """Return the SHA-256 of each compiled file by its absolute path."""
    since = mark.stat().st_ctime_ns
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, capture_output=True, check=False)
    tracked = set(map(os.fsdecode, listed.stdout.split(b"\0")))
    paths = [path for path in _elf_files(tree, 0) if str(path.relative_to(tree)) not in tracked]
    for folder in map(Path, sys.path):
        if not folder.is_relative_to(tree) and not tree.is_relative_to(folder):
            paths += _elf_files(folder, since)
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _elf_files(top: Path, since: int) -> Iterator[Path]:
    for folder, folders, names in os.walk(top):
        folders[:] = [name for name in folders if name != ".git"]
        for name in names:
            path = Path(folder, name)
            try:
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode) or status.st_ctime_ns <= since:
                    continue
                with path.open("rb") as file:
                    if file.read(len(_MAGIC)) == _MAGIC:
                        yield path
            except OSError:
                continue


def main() -> None:
    request = json.load(sys.stdin)
    files = compiled_files(Path(request["tree"]), Path(request["mark"]))
    if request["copies"]:
        copies = Path(request["copies"])
        copies.mkdir(parents=True)
        for number, path in enumerate(files):
            shutil.copyfile(path, copies / str(number))
    json.dump(list(files.items()), sys.stdout)


if __name__ == "__main__":
    main()
