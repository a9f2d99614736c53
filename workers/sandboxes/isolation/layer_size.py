"""The size of a sandbox's writable layer; standard library only.

A layer of up to `_FEW` files is counted in this process, which costs less than a fork. A larger one, or one with
folders that this process cannot enter, is counted by a child process, so that the caller does not wait.

Allocated blocks are counted instead of file sizes, because files can be sparse. Files, folders and links are counted
because each takes an inode. Folders can be nested to any depth: the walk does not recurse, and keeps only the first and
the last descriptors of the path open. In between it goes up through `..` if the parent is still the same folder.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import time

from workers.sandboxes.isolation import linux

_HELD = 100
"""Number of folders held open at the top, and at the bottom, of the path."""
_FEW = 200
"""Largest number of entries that is counted without a child process."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def size_of_few(folder: int) -> tuple[int, int] | None:
    """Return bytes and entries of the layer, or None if there are more than `_FEW` entries or one cannot be read."""
    n_bytes = n_files = 0
    todo: list[int] = []
    try:
        todo.append(os.open("upper", _FOLDER, dir_fd=folder))
        while todo:
            descriptor = todo.pop()
            try:
                with os.scandir(descriptor) as entries:
                    for entry in entries:
                        n_files += 1
                        if n_files > _FEW:
                            return None
                        status = entry.stat(follow_symlinks=False)
                        n_bytes += 512 * status.st_blocks
                        if stat.S_ISDIR(status.st_mode):
                            todo.append(os.open(entry.name, _FOLDER, dir_fd=descriptor))
            finally:
                os.close(descriptor)
    except OSError:
        return None
    finally:
        for descriptor in todo:
            os.close(descriptor)
    return n_bytes, n_files


class LayerSize:
    """A measurement in a child process. It starts in the constructor; `take` returns its result.

    Raises OSError if the process cannot fork. SIGCHLD must be ignored, so that the kernel reaps the child.
    """

    def __init__(self, folder: int) -> None:
        """`folder` is a descriptor of the sandbox's state folder, which contains `upper`."""
        self._text = b""
        self._pipe, write_end = os.pipe()
        child = -1
        try:
            child = os.fork()
        finally:
            if child:
                os.close(write_end)
                if child < 0:
                    os.close(self._pipe)
        if child == 0:
            with contextlib.suppress(OSError):
                linux.die_with_parent(signal.SIGKILL)
                # only root of the user namespace can enter every folder
                linux.become_root_of_a_new_user_namespace()
            began = time.monotonic()
            n_bytes, n_files, _ = usage_and_closed(folder)
            os.write(write_end, f"{n_bytes} {n_files} {time.monotonic() - began}".encode())
            os._exit(0)

    def take(self, wait_s: float) -> tuple[int, int, float] | None:
        """Return bytes, entries and seconds; zeros after an error; None if it is unfinished after `wait_s`."""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        deadline = time.monotonic() + wait_s
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            data = os.read(self._pipe, 64)
            if not data:
                n_bytes, n_files, took_s = (self._text or b"0 0 0").split()
                return int(n_bytes), int(n_files), float(took_s)
            self._text += data
        return None

    def close(self) -> None:
        os.close(self._pipe)


def usage_and_closed(folder: int) -> tuple[int, int, int]:
    """Return bytes and entries of the layer `upper` in a state folder, and folders that this process may not enter."""
    walk = _Walk()
    with contextlib.suppress(OSError):
        walk.into("upper", folder)
        while walk.depth:
            name = walk.next_folder()
            if name is None:
                walk.back()
                continue
            try:
                walk.into(name)
            except PermissionError:
                walk.n_closed += 1
            except OSError:
                # removed since it was listed
                continue
    return walk.n_bytes, walk.n_files, walk.n_closed


class _Walk:
    """Position and counts of a walk: the path of folders from the top, and what each has left to visit."""

    def __init__(self) -> None:
        self.n_bytes = self.n_files = self.n_closed = 0
        self._descriptors: list[int] = []
        """-1 for a folder that is not held open."""
        self._identities: list[tuple[int, int]] = []
        self._todo: list[list[str]] = []

    @property
    def depth(self) -> int:
        return len(self._todo)

    def into(self, name: str, above: int | None = None) -> None:
        """Enter a folder and count its entries. Raises OSError."""
        descriptor = os.open(name, _FOLDER, dir_fd=self._descriptors[-1] if above is None else above)
        try:
            status = os.fstat(descriptor)
            folders = self._count(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptors.append(descriptor)
        self._identities.append((status.st_dev, status.st_ino))
        self._todo.append(folders)
        if self.depth > 2 * _HELD:
            os.close(self._descriptors[-_HELD])
            self._descriptors[-_HELD] = -1

    def _count(self, descriptor: int) -> list[str]:
        folders = []
        with os.scandir(descriptor) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    self.n_bytes += 512 * entry.stat(follow_symlinks=False).st_blocks
                    self.n_files += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
        return folders

    def next_folder(self) -> str | None:
        """Return the name of an unvisited subfolder of the current folder, or None."""
        return self._todo[-1].pop() if self._todo[-1] else None

    def back(self) -> None:
        """Go up to the parent, or to the next ancestor that is still open if the parent was moved."""
        below = self._descriptors.pop()
        self._identities.pop()
        self._todo.pop()
        if self.depth and self._descriptors[-1] < 0:
            with contextlib.suppress(OSError):
                above = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=below)
                status = os.fstat(above)
                if (status.st_dev, status.st_ino) == self._identities[-1]:
                    self._descriptors[-1] = above
                else:
                    os.close(above)
        os.close(below)
        while self.depth and self._descriptors[-1] < 0:
            self._descriptors.pop()
            self._identities.pop()
            self._todo.pop()
