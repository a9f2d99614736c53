"""Pack a writable layer into a tar stream and unpack it, including overlayfs whiteouts and opaque folders.

Runs in a child of the fork server, as the sandbox user and as root of a new user namespace, because a layer can contain
files that their owner cannot read. The stream is not trusted: nothing is unpacked outside of the working directory.
Standard library only.
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
from workers.sandboxes.isolation.restoring.footprint import restore_footprint, summary

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

MAX_FILES = 500_000
MAX_PATH = 3800
"""Longest path in a layer, in bytes. Programs in a sandbox cannot name a longer one; its entry is left out."""
_CHUNK = 1 << 20
_OF_OVERLAY = "user.overlay."
_KEPT_OF_OVERLAY = ("user.overlay.opaque", "user.overlay.whiteout", "user.overlay.whiteouts")
"""The other overlay attributes refer to the lower layers of the node where they were written."""
_HEADER = "SCHILY.xattr."
MAX_SHOWN = 50
"""Maximum number of entries in a summary of paths."""
_SHOWN = 200


class LayerRefused(Exception):
    """The layer exceeds a limit, or the stream is not a valid layer. The message is the reason."""


def pack(pipe: int, max_bytes: int, _lower: Sequence[str] = ()) -> None:
    """Write the working directory as a tar stream. Raises LayerRefused above `max_bytes` or `MAX_FILES`."""
    n_bytes = 0
    for n_files, path in enumerate(_paths(), start=1):
        status = os.lstat(path)
        n_bytes += status.st_size if stat.S_ISREG(status.st_mode) else 0
        if n_bytes > max_bytes or n_files > MAX_FILES:
            raise LayerRefused(f"the layer exceeds {max_bytes} bytes or {MAX_FILES} files")
    seen: dict[tuple[int, int], str] = {}
    with os.fdopen(pipe, "wb") as stream, tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for path in _paths():
            _pack_one(archive, path, seen)


def _paths() -> Iterator[str]:
    """Yield the paths below the working directory that a layer keeps, parents first."""
    return (path for path, kept in _all_paths() if kept)


def _all_paths() -> Iterator[tuple[str, bool]]:
    """Yield each path below the working directory and whether a layer keeps it. Skipped folders are not entered."""
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        with os.scandir(prefix or ".") as entries:
            children = sorted(entries, key=lambda entry: entry.name)
        for entry in children:
            path = prefix + entry.name
            kept = len(os.fsencode(path)) <= MAX_PATH and _is_kept(entry)
            # each sandbox writes its own hosts file
            kept = kept and not (path == hosts_file.PATH and hosts_file.is_ours(path))
            yield path, kept
            if kept and entry.is_dir(follow_symlinks=False):
                waiting.append(path + "/")


def _is_kept(entry: os.DirEntry[str]) -> bool:
    """Return False for pipes, sockets and devices, except the overlay's whiteouts.

    A reader of a pipe or a device could block forever.
    """
    if entry.is_symlink() or entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False):
        return True
    status = entry.stat(follow_symlinks=False)
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def clean(pipe: int, _max_bytes: int, _lower: Sequence[str] = ()) -> None:
    """Remove everything that a layer does not keep: special files, and paths beyond `MAX_PATH`."""
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
        with open(path, "rb", 0) as file:
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
    """Unpack a tar stream into the working directory, which must be empty. Raises LayerRefused, OSError."""
    folders = {""}
    n_bytes = 0
    with os.fdopen(pipe, "rb") as stream:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                if folder not in folders or name in ("", ".", ".."):
                    raise LayerRefused(f"the layer has no parent folder for {member.name!r:.200}")
                n_bytes += member.size
                if n_bytes > max_bytes:
                    raise LayerRefused(f"the layer exceeds {max_bytes} bytes")
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
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            while chunk := source.read(_CHUNK):
                file.write(chunk)
    elif member.issym():
        os.symlink(member.linkname, path)
        return
    elif member.islnk() and member.linkname.rpartition("/")[0] in folders:
        os.link(member.linkname, path, follow_symlinks=False)
        return
    elif member.isfifo():
        # older releases packed pipes
        return
    elif member.ischr() and (member.devmajor, member.devminor) == (0, 0):
        os.mknod(path, stat.S_IFCHR | 0o600, 0)
        return
    else:
        raise LayerRefused(f"the layer contains {path!r:.200}, which has an unsupported type")
    for name, value in member.pax_headers.items():
        attribute = name.removeprefix(_HEADER)
        if name.startswith(f"{_HEADER}user."):
            os.setxattr(path, attribute, os.fsencode(value), follow_symlinks=False)
    os.chmod(path, member.mode & 0o7777, follow_symlinks=True)
    if not member.isdir():
        os.utime(path, (member.mtime, member.mtime))


def restore(pipe: int, _max_bytes: int, lower: Sequence[str]) -> dict[str, Any]:
    """Remove paths from the layer according to a JSON rule, so that the folders below, `lower`, show through.

    The rule has the fields of `RestoredFiles`, plus `bin_folders` and `workdir`. Returns a summary and the number of
    the paths that `footprint.py` removed.
    """
    with os.fdopen(pipe, "rb") as stream:
        rule = json.loads(stream.read())
    for path in (*rule["trees"], *rule["files"]):
        parts = path.strip("/").split("/")
        # unless one of its parents is a link
        if not any(os.path.islink("/".join(parts[:n])) for n in range(1, len(parts))):
            _remove("/".join(parts))
    removed = restore_footprint(rule, lower, _paths, _remove) if rule["system"] else []
    # root's Python writes byte code without being asked to
    removed = [path for path in removed if "/__pycache__/" not in path]
    shown = [ascii(path)[1:-1][:_SHOWN] for path in summary(removed, MAX_SHOWN)]
    return {"restored": shown, "n_restored": len(removed)}


def settle(pipe: int, _max_bytes: int, lower: Sequence[str]) -> None:
    """Record owners of files in the working directory; the pipe has the arguments of `file_owners.settle` as JSON."""
    with os.fdopen(pipe, "rb") as stream:
        file_owners.settle(".", lower=lower, **json.loads(stream.read()))


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            _remove_folder(path)
        else:
            os.unlink(path)


def _remove_folder(path: str) -> None:
    """Remove a folder of any depth. Subfolders are moved to the top first, so that no path gets too long."""
    top = f".{os.urandom(16).hex()}"
    os.mkdir(top, 0o700)
    os.rename(path, f"{top}/0")
    n_moved = 1
    for number in itertools.count():
        if number == n_moved:
            break
        folder = f"{top}/{number}"
        os.chmod(folder, 0o700)
        for name in os.listdir(folder):
            inside = f"{folder}/{name}"
            if stat.S_ISDIR(os.lstat(inside).st_mode):
                os.chmod(inside, 0o700)
                os.rename(inside, f"{top}/{n_moved}")
                n_moved += 1
            else:
                os.unlink(inside)
        os.rmdir(folder)
    os.rmdir(top)


ACTIONS: dict[str, Callable[[int, int, Sequence[str]], dict[str, Any] | None]] = {
    "pack": pack,
    "unpack": unpack,
    "clean": clean,
    "restore": restore,
    "settle": settle,
}
