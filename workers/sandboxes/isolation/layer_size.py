"""The size of a sandbox's writable layer; standard library only.

One of a few files is counted at once. Any other is counted by a child, so that its caller need not wait, and which can
enter what is closed: to fork it costs more than to count what most sandboxes have written.

Blocks are counted, as files may have holes, or space that was never written; and files, folders and links, each of
which takes an inode. Folders may be nested as deep as the policy likes, so nothing here recurses, and of the folders on
the way down only the upper ones and the last are held open: the way back up is `..`, if that is still where it was.
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
"""So many folders are held open from the top, and from the bottom."""
_FEW = 200
"""The files and folders of a layer that is counted at once."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def size_of_few(folder: int) -> tuple[int, int] | None:
    """Return bytes and files as `usage` does; None if they are many, or something is closed to this process."""
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
    """Begun when made; `take` what came of it. Raises OSError if there can be no child; the kernel is to reap it."""

    def __init__(self, folder: int) -> None:
        """`folder` is the sandbox's."""
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
                # only root of a user namespace can enter every folder of it
                linux.become_root_of_a_new_user_namespace()
            began = time.monotonic()
            n_bytes, n_files = usage(folder)
            os.write(write_end, f"{n_bytes} {n_files} {time.monotonic() - began}".encode())
            os._exit(0)

    def take(self, wait_s: float) -> tuple[int, int, float] | None:
        """Return bytes, files, and the seconds of counting; all 0 if that failed. None if it goes on after `wait_s`."""
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


def usage(folder: int) -> tuple[int, int]:
    """Bytes that the writable layer `upper` of a sandbox's folder takes, and files and folders in it, links too."""
    return usage_and_closed(folder)[:2]


def usage_and_closed(folder: int) -> tuple[int, int, int]:
    """Return what `usage` does, and how many folders are closed to this process."""
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
                # one that is gone
                continue
    return walk.n_bytes, walk.n_files, walk.n_closed


class _Walk:
    """The progress of counting: the folders from the top to the current one, and the counts so far."""

    def __init__(self) -> None:
        self.n_bytes = self.n_files = self.n_closed = 0
        self._descriptors: list[int] = []
        """-1 for those that are not held open."""
        self._identities: list[tuple[int, int]] = []
        self._todo: list[list[str]] = []

    @property
    def depth(self) -> int:
        return len(self._todo)

    def into(self, name: str, above: int | None = None) -> None:
        """Go into a folder, and count all that is in it. Raises OSError."""
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
        """Count the entries of a folder; those that are folders."""
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
        """The name of a folder, in the one where it is, that was not counted yet."""
        return self._todo[-1].pop() if self._todo[-1] else None

    def back(self) -> None:
        """Go up to the folder above; further, if what lies between was moved."""
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
