# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH115, PTH211
"""A writable layer as a tar stream and back, with what an overlay understands: deleted files, opaque folders; standard
library only.

Done by a child of the fork server as the sandbox user, root of a user namespace of its own: the policy may have left
files that not even their owner can read. Whoever made the stream, nothing is unpacked outside of the folder.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import stat
import tarfile

from workers.sandboxes.isolation.network import hosts_file
from workers.sandboxes.isolation.owners import file_owners
from workers.sandboxes.isolation.restoring.restored_layer import restore_footprint, summary

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

MAX_FILES = 500_000
MAX_PATH = 3800
"""Bytes of a path in a layer: no program could name a longer one in a sandbox, so that what it leads to is left out."""
_CHUNK = 1 << 20
_OF_OVERLAY = "user.overlay."
_KEPT_OF_OVERLAY = ("user.overlay.opaque", "user.overlay.whiteout", "user.overlay.whiteouts")
"""The others are of the layers below where they were made."""
_HEADER = "SCHILY.xattr."
MAX_SHOWN = 50
"""Entries of the summary of all paths that were left out."""
_SHOWN = 200


class LayerRefused(Exception):
    """In words: it is too large, or no such layer."""


def pack(pipe: int, max_bytes: int, _lower: Sequence[str] = ()) -> None:
    """Write the working directory as a tar stream. Raises LayerRefused if its files have more than `max_bytes`."""
    n_bytes = 0
    for n_files, path in enumerate(_paths(), start=1):
        status = os.lstat(path)
        n_bytes += status.st_size if stat.S_ISREG(status.st_mode) else 0
        if n_bytes > max_bytes or n_files > MAX_FILES:
            raise LayerRefused(f"its files have more than {max_bytes} bytes, or are more than {MAX_FILES}")
    seen: dict[tuple[int, int], str] = {}
    with os.fdopen(pipe, "wb") as stream, tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for path in _paths():
            _pack_one(archive, path, seen)


def _paths() -> Iterator[str]:
    """Yield the paths below the working directory that a layer keeps, a folder before what is in it."""
    return (path for path, kept in _all_paths() if kept)


def _all_paths() -> Iterator[tuple[str, bool]]:
    """Yield the paths below the working directory, and whether a layer keeps them; none below one that it does not."""
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        with os.scandir(prefix or ".") as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            path = prefix + entry.name
            kept = len(os.fsencode(path)) <= MAX_PATH and _is_kept(entry)
            # each sandbox gets its own
            kept = kept and not (path == hosts_file.PATH and hosts_file.is_ours(path))
            yield path, kept
            if kept and entry.is_dir(follow_symlinks=False):
                waiting.append(path + "/")


def _is_kept(entry: os.DirEntry[str]) -> bool:
    """Return False for a pipe, a socket or a device, but for an overlay's mark of a deleted file.

    Whoever opens one may wait for ever.
    """
    if entry.is_symlink() or entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False):
        return True
    status = entry.stat(follow_symlinks=False)
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def clean(pipe: int, _max_bytes: int, _lower: Sequence[str] = ()) -> None:
    """Remove from the working directory what no layer keeps: special files, and paths beyond `MAX_PATH`."""
    os.close(pipe)
    for path in [path for path, kept in _all_paths() if not kept]:
        _remove(path)


def _pack_one(archive: tarfile.TarFile, path: str, seen: dict[tuple[int, int], str]) -> None:
    status = os.lstat(path)
    info = tarfile.TarInfo(path)
    info.mode, info.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
    kind = stat.S_IFMT(status.st_mode)
    if kind in (stat.S_IFREG, stat.S_IFDIR):
        info.pax_headers = dict(_attributes(path))
    if kind == stat.S_IFREG:
        inode = status.st_dev, status.st_ino
        if inode in seen:
            info.type, info.linkname = tarfile.LNKTYPE, seen[inode]
            archive.addfile(info)
            return
        seen[inode] = path
        info.size = status.st_size
        with open(path, "rb", 0) as file:  # noqa: PTH123
            archive.addfile(info, file)
        return
    if kind == stat.S_IFDIR:
        info.type = tarfile.DIRTYPE
    elif kind == stat.S_IFLNK:
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
    else:
        info.type = tarfile.CHRTYPE
    archive.addfile(info)


def _attributes(path: str) -> Iterator[tuple[str, str]]:
    for name in os.listxattr(path, follow_symlinks=False):
        if name.startswith("user.") and (name in _KEPT_OF_OVERLAY or not name.startswith(_OF_OVERLAY)):
            yield _HEADER + name, os.fsdecode(os.getxattr(path, name, follow_symlinks=False))


def unpack(pipe: int, max_bytes: int, _lower: Sequence[str] = ()) -> None:
    """Make files in the working directory, which is empty, from a tar stream. Raises LayerRefused, OSError."""
    folders = {""}
    n_bytes = 0
    with os.fdopen(pipe, "rb") as stream:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                if folder not in folders or name in ("", ".", ".."):
                    raise LayerRefused(f"it has no place for {member.name!r:.200}")
                n_bytes += member.size
                if n_bytes > max_bytes:
                    raise LayerRefused(f"its files have more than {max_bytes} bytes")
                _make(archive, member, folders)
        while stream.read(_CHUNK):
            pass


def _make(archive: tarfile.TarFile, member: tarfile.TarInfo, folders: set[str]) -> None:
    path = member.name
    if member.isdir():
        os.mkdir(path, 0o700)
        folders.add(path)
    elif member.isreg():
        source = archive.extractfile(member)
        assert source
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:  # noqa: PTH123
            while chunk := source.read(_CHUNK):
                file.write(chunk)
    elif member.issym():
        os.symlink(member.linkname, path)
        return
    elif member.islnk() and member.linkname.rpartition("/")[0] in folders:
        os.link(member.linkname, path, follow_symlinks=False)
        return
    elif member.isfifo():
        # earlier releases kept pipes
        return
    elif member.ischr() and (member.devmajor, member.devminor) == (0, 0):
        os.mknod(path, stat.S_IFCHR | 0o600, 0)
        return
    else:
        raise LayerRefused(f"{path!r:.200} is nothing that a layer has")
    for name, value in member.pax_headers.items():
        attribute = name.removeprefix(_HEADER)
        if name.startswith(f"{_HEADER}user."):
            os.setxattr(path, attribute, os.fsencode(value), follow_symlinks=False)
    os.chmod(path, member.mode & 0o7777, follow_symlinks=True)
    if not member.isdir():
        os.utime(path, (member.mtime, member.mtime))


def restore(pipe: int, _max_bytes: int, lower: Sequence[str]) -> dict[str, Any]:
    """Remove from the working directory what a rule in JSON names, so that the folders below, `lower`, show instead.

    The rule has the fields of `RestoredFiles`, `bin_folders`, where programs are, and `workdir`. Returns a summary of
    the paths that `footprint.py` leaves out, and how many those are.
    """
    with os.fdopen(pipe, "rb") as stream:
        rule = json.loads(stream.read())
    for path in (*rule["trees"], *rule["files"]):
        _remove_below(path.strip("/"))
    removed = restore_footprint(rule, lower, _paths, _remove) if rule["system"] else []
    # an interpreter that is root writes it by itself
    removed = [path for path in removed if "/__pycache__/" not in path]
    shown = [ascii(path)[1:-1][:_SHOWN] for path in summary(removed, MAX_SHOWN)]
    return {"restored": shown, "n_restored": len(removed)}


def settle(pipe: int, _max_bytes: int, lower: Sequence[str]) -> None:
    """Note the owners of the files in the working directory, as JSON of the arguments of `file_owners.settle` says."""
    with os.fdopen(pipe, "rb") as stream:
        file_owners.settle(".", lower=lower, **json.loads(stream.read()))


def _remove_below(path: str) -> None:
    """Remove a path if no folder above it is a link."""
    parts = path.split("/")
    if not any(os.path.islink("/".join(parts[:n])) for n in range(1, len(parts))):  # noqa: PTH114
        _remove(path)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            _remove_folder(path)
        else:
            os.unlink(path)  # noqa: PTH108


def _remove_folder(path: str) -> None:
    """Remove a folder, however deep others lie in it: each is moved to the top before it is emptied."""
    top = f".{os.urandom(16).hex()}"
    os.mkdir(top, 0o700)
    os.rename(path, f"{top}/0")
    n_moved = 1
    for number in itertools.count():
        if number == n_moved:
            break
        folder = f"{top}/{number}"
        os.chmod(folder, 0o700)
        for name in os.listdir(folder):  # noqa: PTH208
            inside = f"{folder}/{name}"
            if stat.S_ISDIR(os.lstat(inside).st_mode):
                os.chmod(inside, 0o700)
                os.rename(inside, f"{top}/{n_moved}")
                n_moved += 1
            else:
                os.unlink(inside)  # noqa: PTH108
        os.rmdir(folder)
    os.rmdir(top)


ACTIONS: dict[str, Callable[[int, int, Sequence[str]], dict[str, Any] | None]] = {
    "pack": pack,
    "unpack": unpack,
    "clean": clean,
    "restore": restore,
    "settle": settle,
}
