"""The files of a local sandbox: everything below one folder of this machine."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from farm.errors import ToolError

MAX_FILE = 100_000_000


class LocalFiles:
    """Relative paths start in `folder`; paths below `alias`, which need not exist, are mapped to it, too."""

    def __init__(self, folder: Path, alias: str) -> None:
        self._folder = folder.resolve()
        self._alias = alias

    def _place(self, path: str) -> Path:
        """Return a path's location on this machine. Raises ToolError if it is outside the sandbox."""
        if not path or "\0" in path:
            raise ToolError(f"{path!r}: Not a path")
        relative = Path(path).relative_to(self._alias) if Path(path).is_relative_to(self._alias) else Path(path)
        # An absolute path replaces the folder in the join.
        place = self._folder / relative
        if not Path(os.path.normpath(place)).is_relative_to(self._folder):
            raise ToolError(f"{path}: No such file or directory in a local sandbox, which has only its working folder")
        return place

    def read(self, path: str) -> bytes:
        """See `workers.plugins.interfaces.Sandbox.read_file`."""
        with _translated_errors(path):
            descriptor = os.open(self._place(path), os.O_RDONLY | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                _check(path, os.fstat(descriptor))
                return file.read()

    def write(self, path: str, data: bytes) -> None:
        """See `workers.plugins.interfaces.Sandbox.write_file`."""
        with _translated_errors(path):
            place = self._place(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                _check(path, os.fstat(descriptor))
                file.truncate()
                file.write(data)

    def upload(self, source: Path, path: str) -> None:
        """See `workers.plugins.interfaces.Sandbox.upload`."""
        with _translated_errors(path):
            place = self._place(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            _copy(source, place)

    def download(self, path: str, target: Path) -> None:
        """See `workers.plugins.interfaces.Sandbox.download`."""
        if target.exists() or target.is_symlink():
            raise ToolError(f"{target} already exists on the node")
        with _translated_errors(path):
            _copy(self._place(path), target)


def _check(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ToolError(f"{path}: {'Is a directory' if stat.S_ISDIR(status.st_mode) else 'Not a regular file'}")
    if status.st_size > MAX_FILE:
        raise ToolError(f"{path}: File is larger than {MAX_FILE // 1_000_000} MB")


def _copy(source: Path, target: Path) -> None:
    """Copy a file or a folder; within a folder, skip links that lead out of it, devices and sockets."""
    if not source.is_dir():
        if not source.is_file():
            raise ToolError(
                f"{source.name}: {'Not a regular file' if source.exists() else 'No such file or directory'}"
            )
        shutil.copy2(source, target)
        return
    top = source.resolve()

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if not _may_be_copied(Path(folder, name), top)]

    shutil.copytree(top, target, symlinks=True, ignore=left_out)


def _may_be_copied(path: Path, top: Path) -> bool:
    if path.is_symlink():
        return not path.readlink().is_absolute() and Path(os.path.realpath(path)).is_relative_to(top)
    return path.is_dir() or path.is_file()


@contextmanager
def _translated_errors(path: str) -> Iterator[None]:
    """Translate this machine's errors to messages about the sandbox's path."""
    try:
        yield
    except shutil.Error as error:
        raise ToolError(f"{path}: {error}") from error
    except (OSError, RecursionError) as error:
        raise ToolError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
