"""Source archives of the package index as layers of a sandbox: fetched by digest, unpacked once per node."""

from __future__ import annotations

import lzma
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from farm.errors import SandboxError
from farm.records.request import Archive
from workers.config import SandboxConfig
from workers.sandboxes.images.content_store import digest, made_once, used
from workers.sandboxes.resource_exhaustion import shortage
from workers.sandboxes.sandbox_user import give, sandbox_user

BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, RuntimeError)
"""All errors that reading a broken archive can raise; includes OSError, which also means a full disk."""
_ZIP = (b"PK\3\4", b"PK\5\6")


class BadArchive(SandboxError):
    """An archive is broken, cannot be read, or contains a member outside of its folder."""


def layer(config: SandboxConfig, archive: Archive) -> Path:
    """Return a layer with the contents of the archive's top folder at the archive's path. SandboxError. Blocks."""

    def make(folder: Path) -> None:
        # imported here, because the index client loads slowly and few processes fetch
        from workers.sandboxes.images.package_index import fetch

        with tempfile.TemporaryDirectory() as downloads:
            unpack(fetch(archive, Path(downloads)), folder, archive.path)
        give(folder, config.user)

    return used(made_once(_path_of(config, archive), make))


def is_unpacked(config: SandboxConfig, archive: Archive) -> bool:
    """Return whether this node has the layer, so that nothing must be fetched."""
    return _path_of(config, archive).is_dir()


def _path_of(config: SandboxConfig, archive: Archive) -> Path:
    name = digest(
        "archive", archive.name.lower(), archive.version, archive.sha256, archive.path, sandbox_user(config.user)
    )
    return config.cache / "archives" / name


def unpack(source: Path, folder: Path, path: str) -> None:
    """Unpack an archive so that the contents of its single top folder are at `path` below `folder`. SandboxError."""
    target = folder / path.strip("/")
    if ".." in PurePosixPath(path).parts or target == folder:
        raise SandboxError(f"an archive cannot be unpacked at {path!r}: name a folder, such as /workspace")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        try:
            extract(source, Path(name))
        except BadArchive as error:
            raise SandboxError(f"{source.name} cannot be unpacked: {error}") from error
        tops = list(Path(name).iterdir())
        if len(tops) != 1 or not tops[0].is_dir():
            raise SandboxError(f"{source.name} has no single top folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(tops[0], target)


def extract(source: Path, folder: Path) -> None:
    """Unpack an untrusted archive: no member lands outside of the folder or becomes a device. Blocks.

    Raises BadArchive, or SandboxError if the node has no space.
    """
    try:
        _extract(source, folder)
    except BROKEN as error:
        if isinstance(error, OSError) and (why := shortage(error, folder)):
            raise SandboxError(f"{source.name} could not be unpacked: {why}") from error
        raise BadArchive(first_line(error)) from error


def first_line(error: Exception) -> str:
    """Return why an archive cannot be read: tarfile reports each method that it tried on a separate line."""
    return str(error).partition("\n")[0].rstrip(":")


def _extract(source: Path, folder: Path) -> None:
    with source.open("rb") as file:
        is_zip = file.read(4) in _ZIP
    if is_zip:
        with zipfile.ZipFile(source) as packed:
            for member in packed.infolist():
                # the zipfile module makes names harmless, but does not restore executable bits
                path = Path(packed.extract(member, folder))
                if (member.external_attr >> 16) & 0o100 and path.is_file():
                    path.chmod(path.stat().st_mode | 0o111)
        return
    with tarfile.open(source) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:
            _extract_checked(archive, folder.resolve())


def _extract_checked(archive: tarfile.TarFile, root: Path) -> None:
    """Extract like the data filter, for Python before 3.11.4: no set-user bits.

    Raises TarError for a device or a member that leads outside.
    """
    for member in archive:
        target = (root / member.name).resolve()
        leads = [target]
        if member.issym():
            leads.append((target.parent / member.linkname).resolve())
        elif member.islnk():
            leads.append((root / member.linkname).resolve())
        elif not member.isfile() and not member.isdir():
            raise tarfile.TarError(f"{member.name} is not a file, folder or link")
        if not all(path.is_relative_to(root) for path in leads):
            raise tarfile.TarError(f"{member.name} leads outside")
        member.mode = (member.mode | 0o600) & 0o755
        archive.extract(member, root)
