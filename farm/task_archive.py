"""Task archives: a folder as a tar whose bytes depend only on the files, and safe unpacking.

An archive has regular files, folders and links inside it, sorted by name. Of their metadata only the executable bit
is kept. So the SHA-256 of an archive identifies its contents.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from farm.errors import InvalidRequest

MAX_ARCHIVE_BYTES = 2_000_000_000
MAX_ARCHIVE_FILES = 100_000
_CHUNK = 1 << 20
_MAX_NAME = 1000


def pack(source: Path, archive: IO[bytes]) -> str:
    """Write a folder, or the contents of a tar (compressed or not), as an archive. Returns its digest.

    Raises InvalidRequest, with its name, for a file that an archive cannot hold, and beyond the size limits.
    """
    if source.is_dir():
        return _pack_folder(source, archive)
    if not source.is_file():
        raise InvalidRequest(f"{source} is neither a folder nor a tar", field="archive")
    with tempfile.TemporaryDirectory(prefix="farm-archive-") as folder:
        top = Path(folder) / "files"
        try:
            with tarfile.open(source, "r:*") as given:
                _unpack(given, top, whole=False)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise InvalidRequest(f"{source} cannot be read as a tar: {error}", field="archive") from error
        return _pack_folder(top, archive)


def _pack_folder(top: Path, archive: IO[bytes]) -> str:
    n_bytes, n_files = 0, 0
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, name in _entries(top):
            info = _described(path, name)
            n_bytes, n_files = n_bytes + info.size, n_files + 1
            _check_size(n_bytes, n_files)
            if info.isreg():
                with path.open("rb") as file:
                    tar.addfile(info, file)
            else:
                tar.addfile(info)
    archive.seek(0)
    digest = hashlib.sha256()
    while chunk := archive.read(_CHUNK):
        digest.update(chunk)
    archive.seek(0)
    return digest.hexdigest()


def _entries(top: Path) -> Iterator[tuple[Path, str]]:
    """Yield the paths below a folder and their names there, sorted, each folder before its contents."""
    waiting = [("", top)]
    while waiting:
        prefix, folder = waiting.pop()
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            yield Path(entry.path), prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                waiting.append((f"{prefix}{entry.name}/", Path(entry.path)))


def _described(path: Path, name: str) -> tarfile.TarInfo:
    status = path.lstat()
    info = tarfile.TarInfo(name)
    info.mode = 0o755 if stat.S_ISDIR(status.st_mode) or status.st_mode & 0o100 else 0o644
    if stat.S_ISREG(status.st_mode):
        info.size = status.st_size
    elif stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
    else:
        raise InvalidRequest(f"{name} is not a file, a folder or a link", field="archive")
    _check_member(info)
    return info


def unpack(archive: IO[bytes], top: Path) -> None:
    """Unpack an archive, read as a stream, into a new folder. Raises InvalidRequest for an invalid one."""
    try:
        with tarfile.open(fileobj=archive, mode="r|") as tar:
            _unpack(tar, top)
    except (tarfile.TarError, EOFError) as error:
        raise InvalidRequest(f"is not a tar: {error}", field="archive") from error
    while archive.read(_CHUNK):
        pass


def check(archive: IO[bytes]) -> None:
    """Raise InvalidRequest, with the first fault, for a stream that `unpack` would refuse."""
    folders, names = {""}, set[str]()
    n_bytes = 0
    try:
        with tarfile.open(fileobj=archive, mode="r|") as tar:
            for member in tar:
                n_bytes += member.size
                _check_size(n_bytes, len(names) + 1)
                _check_entry(member, folders, names)
    except (tarfile.TarError, EOFError) as error:
        raise InvalidRequest(f"is not a tar: {error}", field="archive") from error
    while archive.read(_CHUNK):
        pass


def _unpack(tar: tarfile.TarFile, top: Path, whole: bool = True) -> None:
    """Unpack. If not `whole`, names may begin with `./` and parent folders may be missing."""
    _make_folder(top)
    folders, names = {""}, set[str]()
    n_bytes = 0
    for member in tar:
        if not whole:
            member.name = member.name.removeprefix("./").rstrip("/")
            if member.name in ("", ".") or (member.isdir() and member.name in folders):
                continue
            _make_above(top, member, folders, names)
        n_bytes += member.size
        _check_size(n_bytes, len(names) + 1)
        _check_entry(member, folders, names)
        path = top / member.name
        if member.isdir():
            _make_folder(path)
        elif member.issym():
            path.symlink_to(member.linkname)
        else:
            source = tar.extractfile(member)
            assert source
            mode = 0o755 if member.mode & 0o100 else 0o644
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
                os.fchmod(file.fileno(), mode)
                while chunk := source.read(_CHUNK):
                    file.write(chunk)


def _make_folder(path: Path) -> None:
    path.mkdir()
    # independent of the umask
    path.chmod(0o755)


def _make_above(top: Path, member: tarfile.TarInfo, folders: set[str], names: set[str]) -> None:
    """Make a member's parent folders that the tar left out."""
    _check_name(member.name)
    parts = member.name.split("/")[:-1]
    for depth in range(1, len(parts) + 1):
        folder = "/".join(parts[:depth])
        if folder not in folders and folder not in names:
            _make_folder(top / folder)
            folders.add(folder)
            names.add(folder)


def _check_entry(member: tarfile.TarInfo, folders: set[str], names: set[str]) -> None:
    _check_member(member)
    if member.name in names:
        raise InvalidRequest(f"{member.name} occurs twice", field="archive")
    if member.name.rpartition("/")[0] not in folders:
        raise InvalidRequest(f"{member.name} has no entry for its folder", field="archive")
    names.add(member.name)
    if member.isdir():
        folders.add(member.name)


def _check_member(member: tarfile.TarInfo) -> None:
    _check_name(member.name)
    if member.issym():
        _check_link(member.name, member.linkname)
    elif not (member.isreg() or member.isdir()):
        kind = "a hard link" if member.islnk() else "a device" if member.isdev() else "of an unsupported kind"
        raise InvalidRequest(f"{member.name} is {kind}: an archive may hold files, folders and links", field="archive")


def _check_name(name: str) -> None:
    if len(name) > _MAX_NAME or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise InvalidRequest(f"{name!r:.200} is not a path inside an archive", field="archive")


def _check_link(name: str, target: str) -> None:
    """Refuse a link out: `..` may only come first, at most once per parent folder (which cannot be a link)."""
    parts = target.split("/")
    n_up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    if not target or target.startswith("/") or "\0" in target or ".." in parts[n_up:] or n_up > name.count("/"):
        raise InvalidRequest(f"{name} is a link to {target!r:.200}, which may lead out of the archive", field="archive")


def _check_size(n_bytes: int, n_files: int) -> None:
    if n_bytes > MAX_ARCHIVE_BYTES or n_files > MAX_ARCHIVE_FILES:
        raise InvalidRequest(
            f"an archive may hold {MAX_ARCHIVE_FILES} files and {MAX_ARCHIVE_BYTES} bytes: split it by instance",
            field="archive",
        )


class PartStream(io.RawIOBase):
    """An archive's bytes, read part by part; `part` returns the part of a number, None after the last."""

    def __init__(self, part: Callable[[int], bytes | None]) -> None:
        self._part = part
        self._hash = hashlib.sha256()
        self._rest = memoryview(b"")
        self._ended = False
        self.n_parts = 0
        self.n_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest and not self._ended:
            data = self._part(self.n_parts)
            self._ended = data is None
            if data is not None:
                self.n_parts += 1
                self.n_bytes += len(data)
                self._hash.update(data)
                self._rest = memoryview(data)
        n = min(len(buffer), len(self._rest))
        buffer[:n] = self._rest[:n]
        self._rest = self._rest[n:]
        return n

    def buffered(self) -> io.BufferedReader:
        return io.BufferedReader(self, 1 << 20)

    def digest(self) -> str:
        """Return the digest of the bytes read so far."""
        return self._hash.hexdigest()
