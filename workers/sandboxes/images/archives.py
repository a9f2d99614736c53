"""Source archives of the package index as layers of a sandbox: fetched by digest, unpacked once per node."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from farm.errors import SandboxError
from farm.records.request import Archive
from farm.settings import settings
from workers.sandboxes.images.content_store import digest, made_once
from workers.sandboxes.sandbox_user import give, sandbox_user


def layer(archive: Archive) -> Path:
    """Return a folder to lay over an image: the archive's top folder, at the archive's path. SandboxError. Blocks."""
    name = digest("archive", archive.name.lower(), archive.version, archive.sha256, archive.path, sandbox_user())

    def make(folder: Path) -> None:
        # here, as the client of an index takes long to load and few processes fetch
        from workers.sandboxes.images.package_index import fetch

        with tempfile.TemporaryDirectory() as downloads:
            unpack(fetch(archive, Path(downloads)), folder, archive.path)
        give(folder)

    return made_once(settings().cache / "archives" / name, make)


def unpack(source: Path, folder: Path, path: str) -> None:
    """Unpack an archive so that its single top folder's contents lie at `path` below `folder`. Raises SandboxError."""
    target = folder / path.strip("/")
    if ".." in PurePosixPath(path).parts or target == folder:
        raise SandboxError(f"an archive cannot be unpacked at {path!r}: name a folder, such as /workspace")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        try:
            extract(source, Path(name))
        except (tarfile.TarError, zipfile.BadZipFile, OSError) as error:
            raise SandboxError(f"{source.name} cannot be unpacked: {error}") from error
        tops = list(Path(name).iterdir())
        if len(tops) != 1 or not tops[0].is_dir():
            raise SandboxError(f"{source.name} has no single top folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(tops[0], target)


def extract(source: Path, folder: Path) -> None:
    """Unpack an untrusted archive: nothing of it lands outside of the folder, or is a device. Blocks."""
    if source.suffix == ".zip":
        with zipfile.ZipFile(source) as packed:
            # zip names are made harmless by the module itself
            packed.extractall(folder)  # noqa: S202
        return
    with tarfile.open(source) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:
            _extract_checked(archive, folder.resolve())


def _extract_checked(archive: tarfile.TarFile, root: Path) -> None:
    """Extract as the data filter does, for Python before 3.11.4: no set-user bits.

    TarError for a member that leads outside, or a device.
    """
    for member in archive:
        target = (root / member.name).resolve()
        leads = [target]
        if member.issym():
            leads.append((target.parent / member.linkname).resolve())
        elif member.islnk():
            leads.append((root / member.linkname).resolve())
        elif not member.isfile() and not member.isdir():
            raise tarfile.TarError(f"{member.name} is no file, folder or link")
        if not all(path.is_relative_to(root) for path in leads):
            raise tarfile.TarError(f"{member.name} leads outside")
        member.mode = (member.mode | 0o600) & 0o755
        archive.extract(member, root)
