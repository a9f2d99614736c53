"""Files of a task's tests and solutions that its `.harborignore` files leave out, as in Harbor.

Each folder of tests or of a solution, and each folder below one, may have such a file with `.gitignore` patterns for
everything below. The last matching pattern decides, and the innermost file comes last; nothing in a folder that is left
out comes back. A link is left out together with its target. The ignore files themselves are left out, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from farm.errors import InvalidRequest
from farm.extras import not_installed

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILE = ".harborignore"
_FOLDERS = ("tests", "solution")


class IgnoredFiles:
    """The files that one task folder leaves out. Its methods raise InvalidRequest, with the file, if it is not text."""

    def __init__(self, task: Path) -> None:
        self._task = Path(os.path.abspath(task))  # noqa: PTH100 - links keep their names
        self._patterns: dict[Path, GitIgnoreSpec | None] = {}

    def has(self, path: Path) -> bool:
        """Return whether a file or folder of the task is left out."""
        path = Path(os.path.abspath(path))  # noqa: PTH100
        if self._is_left_out(path.relative_to(self._task)):
            return True
        if not path.is_symlink():
            return False
        real, root = path.resolve(), self._task.resolve()
        return real.is_relative_to(root) and self._is_left_out(real.relative_to(root))

    def among(self, folder: str, names: Sequence[str]) -> set[str]:
        """Return the ignored names in a folder, as `shutil.copytree` expects."""
        parent = Path(os.path.abspath(folder))  # noqa: PTH100
        return {name for name in names if self.has(parent / name)}

    def kept(self, folder: Path) -> Iterator[Path]:
        """Yield the files and folders below a folder that are not left out."""
        for parent, folders, files in os.walk(os.path.abspath(folder)):  # noqa: PTH100
            out = self.among(parent, [*folders, *files])
            folders[:] = sorted(name for name in folders if name not in out)
            yield from (Path(parent, name) for name in sorted({*folders, *files} - out))

    def _is_left_out(self, relative: Path) -> bool:
        parts = relative.parts
        top = _top(parts)
        if parts[-1:] == (IGNORE_FILE,):
            return True
        return top > 0 and any(self._is_matched(parts[:n], top) for n in range(top + 1, len(parts) + 1))

    def _is_matched(self, parts: tuple[str, ...], top: int) -> bool:
        """Return whether the patterns match one path, ignoring its parents; the first ones are in `top`."""
        found = [(n, self._patterns_in(self._task.joinpath(*parts[:n]))) for n in range(top, len(parts))]
        if not any(patterns for _, patterns in found):
            return False
        mark = "/" if self._task.joinpath(*parts).is_dir() else ""
        is_matched = False
        for n, patterns in found:
            include = None if patterns is None else patterns.check_file("/".join(parts[n:]) + mark).include
            is_matched = is_matched if include is None else include
        return is_matched

    def _patterns_in(self, folder: Path) -> GitIgnoreSpec | None:
        if folder not in self._patterns:
            self._patterns[folder] = _read(folder / IGNORE_FILE)
        return self._patterns[folder]


def _top(parts: Sequence[str]) -> int:
    """Return the number of names up to the folder of tests or solution that contains a path; 0 without one."""
    if parts[:1] and parts[0] in _FOLDERS:
        return 1
    return 3 if len(parts) >= 3 and parts[0] == "steps" and parts[2] in _FOLDERS else 0


def _read(path: Path) -> GitIgnoreSpec | None:
    if not path.is_file():
        return None
    try:
        from pathspec import GitIgnoreSpec
    except ModuleNotFoundError as error:
        raise not_installed(f"{path}: a task that leaves files out", str(error.name)) from error
    try:
        return GitIgnoreSpec.from_lines(path.read_text(encoding="utf-8").splitlines())
    except (ValueError, OSError) as error:
        raise InvalidRequest(f"it cannot be read: {error}", field=str(path)) from error
