"""Files of a sandbox, as the porter's child reaches them from within; standard library only.

What is named may be anything the policy put there: a device without an end, a pipe that nobody writes to, a link. Links
lead where they lead inside; what is no regular file is refused without being read.
"""

from __future__ import annotations

import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import tarfile
    from collections.abc import Callable, Iterator

_CHUNK = 1 << 20


class Refused(Exception):
    """In words for the model."""


def load(action: str) -> None:
    """Import what an action needs, while the host's files are still in reach."""
    if action in ("upload", "download"):
        import tarfile  # noqa: F401


def read(path: str, memory: int, max_bytes: int) -> None:
    """Copy a file into a memory file."""
    # a pipe without a writer must not block
    source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    _check_regular(path, source)
    size = 0
    while chunk := os.read(source, _CHUNK):
        size += len(chunk)
        # files of /proc say they are empty
        if size > max_bytes:
            raise Refused(f"{path}: File is larger than {max_bytes // 1_000_000} MB")
        _write_all(memory, chunk)


def write(path: str, memory: int, max_bytes: int) -> None:
    """Copy a memory file into a file, making its folders."""
    _make_folder(os.path.dirname(path))  # noqa: PTH120
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    _check_regular(path, target)
    os.ftruncate(target, 0)
    os.lseek(memory, 0, os.SEEK_SET)
    while chunk := os.read(memory, _CHUNK):
        _write_all(target, chunk)


def upload(path: str, pipe: int, max_bytes: int) -> None:
    """Unpack a tar stream of one file or folder, named `.` in it, to a path."""
    import tarfile

    path = os.path.abspath(path)  # noqa: PTH100
    _make_folder(os.path.dirname(path))  # noqa: PTH120
    with os.fdopen(pipe, "rb") as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            member.name = os.path.join(path, member.name) if member.name != "." else path  # noqa: PTH118
            if member.islnk():
                member.linkname = os.path.join(path, member.linkname)  # noqa: PTH118
            _unpack(archive, member)
        while stream.read(_CHUNK):
            pass


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    """What comes is the worker's own; where it goes, a folder may be a link, which leads nowhere but inside."""
    if sys.version_info >= (3, 12):
        archive.extract(member, "/", filter="fully_trusted")
    else:
        archive.extract(member, "/")


def download(path: str, pipe: int, max_bytes: int) -> None:
    """Pack a file or folder, named `.`, as a tar stream; devices, pipes and sockets are left out."""
    import tarfile

    mode = os.stat(path).st_mode  # noqa: PTH116
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise Refused(f"{path}: Not a regular file or directory")
    real = os.path.realpath(path)
    size = 0
    with os.fdopen(pipe, "wb") as stream, tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for found, name in _tree(real):
            info = archive.gettarinfo(found, name)
            if info is None or not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
                continue
            if not info.isreg():
                archive.addfile(info)
                continue
            size += info.size
            # a file with holes may say it is larger than any disk
            if size > max_bytes:
                raise Refused(f"{path}: Larger than {max_bytes // 1_000_000} MB")
            with os.fdopen(os.open(found, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
                archive.addfile(info, file)


def _tree(top: str) -> Iterator[tuple[str, str]]:
    """Paths below a file or folder, and their names relative to it, the top first."""
    yield top, "."
    waiting = [("", top)]
    while waiting:
        prefix, folder = waiting.pop()
        if not os.path.isdir(folder) or (prefix and os.path.islink(folder)):  # noqa: PTH112, PTH114
            continue
        for entry in os.scandir(folder):
            name = f"{prefix}{entry.name}"
            yield entry.path, name
            if entry.is_dir(follow_symlinks=False):
                waiting.append((f"{name}/", entry.path))


def _check_regular(path: str, descriptor: int) -> None:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        raise Refused(f"{path}: Is a directory")
    if not stat.S_ISREG(mode):
        raise Refused(f"{path}: Not a regular file")


def _make_folder(folder: str) -> None:
    try:
        os.makedirs(folder or ".", exist_ok=True)  # noqa: PTH103
    except RecursionError:
        raise Refused(f"{folder[:80]}...: Too many folders in one another") from None


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


ACTIONS: dict[str, Callable[[str, int, int], None]] = {
    "read": read,
    "write": write,
    "upload": upload,
    "download": download,
}
