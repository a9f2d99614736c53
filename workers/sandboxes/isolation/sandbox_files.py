"""File operations in a sandbox, run by a child of the fork server within its mounts. Standard library only.

A path can name anything that the policy put there: an endless device, a pipe without a writer, a link. Links are
resolved inside the sandbox. Files that are not regular are refused without being read.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys

from workers.sandboxes.isolation.owners import file_owners

TYPE_CHECKING = False
if TYPE_CHECKING:
    import tarfile
    from collections.abc import Callable, Iterator
    from typing import Any

    from workers.sandboxes.isolation.owners.file_owners import CopiedOwners, Owner

_CHUNK = 1 << 20
MAX_FILES = 200_000
"""Limit on files in a folder that is copied out or listed."""
MAX_DEPTH = 200
MAX_PATH = 3000
"""Limit on the bytes of a path in such a folder: the node must be able to name and remove it in a folder of its own."""


class FileRefused(Exception):
    """The operation was refused. The message is shown to the model."""


def load(action: str) -> None:
    """Import the modules of an action while the host's files can still be read."""
    if action in ("upload", "download"):
        import tarfile  # noqa: F401
    if action in ("move", "remove"):
        import shutil  # noqa: F401


def read(path: str, memory: int, max_bytes: int) -> None:
    """Copy a file into a memory file."""
    # O_NONBLOCK: a pipe without a writer must not block
    source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    _check_regular(path, source)
    size = 0
    while chunk := os.read(source, _CHUNK):
        size += len(chunk)
        # counted while reading, because files of /proc report a size of 0
        if size > max_bytes:
            raise FileRefused(f"{path}: File is larger than {max_bytes // 1_000_000} MB")
        _write_all(memory, chunk)


def write(path: str, memory: int, max_bytes: int) -> None:
    """Copy a memory file into a file, and create missing parent folders."""
    _make_folder(os.path.dirname(path))
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    _check_regular(path, target)
    os.ftruncate(target, 0)
    os.lseek(memory, 0, os.SEEK_SET)
    while chunk := os.read(memory, _CHUNK):
        _write_all(target, chunk)


def upload(path: str, pipe: int, max_bytes: int, owners: CopiedOwners | None = None) -> None:
    """Unpack a tar stream of one file or folder, named `.`, to a path, and record `owners` for all that is created."""
    import tarfile

    path = os.path.abspath(path)
    made = _missing(os.path.dirname(path)) if owners else []
    _make_folder(os.path.dirname(path))
    with os.fdopen(pipe, "rb") as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            is_top = member.name == "."
            if is_top and member.isdir() and os.path.isdir(path):
                # an existing folder keeps its mode; it can be the root folder
                continue
            if is_top and member.isdir() and owners and not owners["whole"]:
                os.mkdir(path, 0o755)
                made.append(path)
                continue
            # an absolute name in the archive is placed below the path too
            member.name = path if is_top else os.path.join(path, member.name.lstrip("/"))
            if member.islnk():
                member.linkname = os.path.join(path, member.linkname.lstrip("/"))
            _unpack(archive, member, owners)
        while stream.read(_CHUNK):
            pass
    if owners:
        file_owners.note_folders(made, owners)


def _missing(folder: str) -> list[str]:
    """Return the missing folders among `folder` and its parents."""
    missing = []
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, owners: CopiedOwners | None) -> None:
    """Unpack a member. Its target folder can be a link, which is resolved inside."""
    if member.isdev():
        # devices and pipes cannot be created in a sandbox
        return
    owner = (owners["each"] or (member.uid, member.gid)) if owners else None
    # only root exists here, and it may have no name
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    if member.isreg():
        _unpack_file(archive, member, owner)
        return
    trusted: Any = {"filter": "fully_trusted"} if sys.version_info >= (3, 12) else {}
    archive.extract(member, "/", **trusted)
    if owner and member.isdir():
        file_owners.note_owner(member.name, *owner, "/")


def _unpack_file(archive: tarfile.TarFile, member: tarfile.TarInfo, owner: Owner | None) -> None:
    """Unpack a regular file. `extract` would block if a pipe has the file's name."""
    source = archive.extractfile(member)
    assert source
    _make_folder(os.path.dirname(member.name))
    target = os.open(member.name, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        _check_regular(member.name, target)
        os.ftruncate(target, 0)
        while chunk := source.read(_CHUNK):
            _write_all(target, chunk)
        if owner:
            file_owners.note_owner(target, *owner, "/")
        os.fchmod(target, member.mode & 0o7777)
        os.utime(target, (member.mtime, member.mtime))
    finally:
        os.close(target)


def download(path: str, pipe: int, max_bytes: int, owners: CopiedOwners | None = None) -> None:
    """Pack a file or folder, named `.`, as a tar stream, with owners if `owners` is set.

    Devices, pipes and sockets are left out. The size is checked before anything is sent, so that a folder that is too
    large is refused at once.
    """
    import tarfile

    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise FileRefused(f"{path}: Not a regular file or directory")
    real = os.path.realpath(path)
    size = 0
    for n_files, (entry_path, _) in enumerate(_tree(real), start=1):
        if n_files > MAX_FILES:
            raise FileRefused(f"{path}: More than {MAX_FILES} files")
        # None if it was removed meanwhile
        status = _status(entry_path)
        # a sparse file can report a size larger than any disk
        size += status.st_size if status and stat.S_ISREG(status.st_mode) else 0
        if size > max_bytes:
            raise FileRefused(f"{path}: Larger than {max_bytes // 1_000_000} MB")
    seen: dict[tuple[int, int], str] = {}
    left = max_bytes
    with os.fdopen(pipe, "wb") as stream, tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for entry_path, name in _tree(real):
            left -= _pack(archive, entry_path, name, seen, with_owners=owners is not None)
            if left < 0:
                raise FileRefused(f"{path}: Larger than {max_bytes // 1_000_000} MB")


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _pack(
    archive: tarfile.TarFile, path: str, name: str, seen: dict[tuple[int, int], str], *, with_owners: bool
) -> int:
    """Add one entry and return its size. Not by `gettarinfo`, which looks up the owner's name each time."""
    import tarfile

    status = _status(path)
    if status is None:
        return 0
    info = tarfile.TarInfo(name)
    # whole seconds: fractions take an additional header
    info.mode, info.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
    if with_owners:
        info.uid, info.gid = file_owners.owner_of(path) or file_owners.ROOT
    inode = status.st_dev, status.st_ino
    if stat.S_ISREG(status.st_mode) and inode in seen:
        info.type, info.linkname = tarfile.LNKTYPE, seen[inode]
    elif stat.S_ISREG(status.st_mode):
        return _pack_file(archive, path, info, seen)
    elif stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
    else:
        return 0
    archive.addfile(info)
    return 0


def _pack_file(archive: tarfile.TarFile, path: str, info: tarfile.TarInfo, seen: dict[tuple[int, int], str]) -> int:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", 0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return 0
        if status.st_nlink > 1:
            seen[status.st_dev, status.st_ino] = info.name
        info.size = status.st_size
        archive.addfile(info, file)
    return info.size


def _tree(top: str) -> Iterator[tuple[str, str]]:
    """Yield the paths below a file or folder, and their names relative to it, the top first."""
    yield top, "."
    waiting = [("", top)]
    while waiting:
        prefix, folder = waiting.pop()
        if not os.path.isdir(folder) or (prefix and os.path.islink(folder)):
            continue
        for entry in os.scandir(folder):
            name = f"{prefix}{entry.name}"
            yield entry.path, name
            if len(os.fsencode(name)) > MAX_PATH:
                raise FileRefused(f"{top}: More than {MAX_PATH} bytes in a path")
            if entry.is_dir(follow_symlinks=False):
                if name.count("/") >= MAX_DEPTH:
                    raise FileRefused(f"{top}: More than {MAX_DEPTH} folders in one another")
                waiting.append((f"{name}/", entry.path))


def list_entries(path: str, memory: int, max_bytes: int) -> None:
    """Replace the options in the memory file by the entries of a folder, as JSON. Depth 0: the path itself."""
    path = os.path.abspath(path)
    depth = _taken(memory)["depth"]
    users, groups = _names("/etc/passwd"), _names("/etc/group")
    if depth == 0:
        entries = [_entry(path, os.lstat(path), users, groups)]
    else:
        entries = []
        waiting = [(path, 1)]
        while waiting:
            folder, level = waiting.pop(0)
            try:
                children = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:
                # removed, or not readable for this user; an error only for the requested folder
                if level == 1:
                    raise
                continue
            for entry in children:
                if (status := _status(entry.path)) is None:
                    continue
                entries.append(_entry(entry.path, status, users, groups))
                if len(entries) > MAX_FILES:
                    raise FileRefused(f"{path}: More than {MAX_FILES} files")
                if level < min(depth, MAX_DEPTH) and stat.S_ISDIR(status.st_mode):
                    waiting.append((entry.path, level + 1))
    data = json.dumps(entries).encode()
    if len(data) > max_bytes:
        raise FileRefused(f"{path}: Has too many files to be listed at once")
    os.ftruncate(memory, 0)
    os.lseek(memory, 0, os.SEEK_SET)
    _write_all(memory, data)


def _entry(path: str, status: os.stat_result, users: dict[int, str], groups: dict[int, str]) -> dict[str, object]:
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "folder"), (stat.S_ISLNK, "link"))
    kind = next((name for is_one, name in kinds if is_one(status.st_mode)), "other")
    return {
        "name": _shown(os.path.basename(path) or "/"),
        "path": _shown(path),
        "kind": kind,
        "size": status.st_size,
        "mode": stat.S_IMODE(status.st_mode),
        "owner": users.get(status.st_uid, str(status.st_uid)),
        "group": groups.get(status.st_gid, str(status.st_gid)),
        "modified_at": status.st_mtime,
        "target": _shown(_target(path)) if kind == "link" else "",
    }


def _shown(name: str) -> str:
    return os.fsencode(name).decode(errors="replace")


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _names(path: str) -> dict[int, str]:
    """Return the names in a passwd or group file by number. The first name of a number is used."""
    names: dict[int, str] = {}
    try:
        source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return names
    try:
        if stat.S_ISREG(os.fstat(source).st_mode):
            for line in os.read(source, _CHUNK).decode(errors="replace").splitlines():
                parts = line.split(":")
                if len(parts) > 2 and parts[2].isdecimal():
                    names.setdefault(int(parts[2]), parts[0])
    finally:
        os.close(source)
    return names


def move(path: str, memory: int, max_bytes: int) -> None:
    """Move a file or folder to the path in the memory file, and create missing parent folders."""
    import shutil

    target = _taken(memory)["target"]
    os.lstat(path)
    _make_folder(os.path.dirname(target))
    try:
        os.rename(path, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.move(path, target)


def remove(path: str, memory: int, max_bytes: int) -> None:
    """Remove a file or a folder tree."""
    import shutil

    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    try:
        shutil.rmtree(path)
    except RecursionError:
        raise FileRefused(f"{path}: Too many folders in one another") from None


def make_folder(path: str, memory: int, max_bytes: int) -> None:
    """Create a folder and missing parents. Raises FileExistsError if it exists."""
    path = os.path.abspath(path)
    _make_folder(os.path.dirname(path))
    os.mkdir(path)


def _taken(memory: int) -> dict[str, Any]:
    return json.loads(os.pread(memory, _CHUNK, 0))  # type: ignore[no-any-return]


def _check_regular(path: str, descriptor: int) -> None:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        raise FileRefused(f"{path}: Is a directory")
    if not stat.S_ISREG(mode):
        raise FileRefused(f"{path}: Not a regular file")


def _make_folder(folder: str) -> None:
    try:
        os.makedirs(folder or ".", exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from None
    except RecursionError:
        raise FileRefused(f"{folder[:80]}...: Too many folders in one another") from None


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


ACTIONS: dict[str, Callable[..., None]] = {
    "read": read,
    "write": write,
    "upload": upload,
    "download": download,
    "list": list_entries,
    "move": move,
    "remove": remove,
    "make_folder": make_folder,
}
