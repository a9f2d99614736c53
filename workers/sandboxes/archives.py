"""Source archives of the package index as layers of a sandbox: fetched by digest, unpacked once per node."""

from __future__ import annotations

import hashlib
import os
import shutil
import ssl
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

import requests
from pypi_simple import DistributionPackage, NoSuchProjectError, PyPISimple, UnsupportedContentTypeError

from farm.errors import SandboxError
from farm.request import Archive
from farm.settings import settings
from workers.sandboxes.content import digest, made_once
from workers.sandboxes.owner import give, sandbox_user

FETCH_S = 300.0


def layer(archive: Archive) -> Path:
    """A folder to lay over an image: the archive's top folder, at the archive's path. SandboxError. Blocks."""
    name = digest("archive", archive.name.lower(), archive.version, archive.sha256, archive.path, sandbox_user())

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as downloads:
            unpack(fetch(archive, Path(downloads)), folder, archive.path)
        give(folder)

    return made_once(settings().cache / "archives" / name, make)


def fetch(archive: Archive, folder: Path) -> Path:
    """Download it from the index that pip uses here, and check its digest. Raises SandboxError.

    pip itself would run the archive's build script to learn its metadata; nothing of an archive runs outside a sandbox.
    """
    what = f"archive {archive.name} {archive.version}"
    try:
        with _index() as index:
            found = _source(index, archive)
            if found is None:
                raise SandboxError(f"{what}: the package index has no source archive with sha256 {archive.sha256}")
            path = folder / found.filename
            index.download_package(found, path, verify=False, timeout=FETCH_S)
    except (requests.RequestException, NoSuchProjectError, UnsupportedContentTypeError) as error:
        raise SandboxError(f"{what} could not be fetched: {error}") from error
    if hashlib.sha256(path.read_bytes()).hexdigest() != archive.sha256:
        raise SandboxError(f"{what}: the digest of what the package index serves is not {archive.sha256}")
    return path


def _source(index: PyPISimple, archive: Archive) -> DistributionPackage | None:
    """The index's file of that name, version and digest; by digest alone where file names are spelled otherwise."""
    page = index.get_project_page(archive.name, timeout=FETCH_S)
    sources = [package for package in page.packages if package.package_type == "sdist"]
    for package in sources:
        if package.digests.get("sha256") == archive.sha256:
            return package
    unhashed = [package for package in sources if package.version == archive.version and not package.digests]
    return unhashed[0] if unhashed else None


def _index() -> PyPISimple:
    """The index that pip is configured to use, trusted as pip trusts it: by its CA file, or the system's."""
    session = requests.Session()
    authorities = _pip("cert")
    if not authorities and not {"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"} & os.environ.keys():
        authorities = ssl.get_default_verify_paths().cafile or ""
    if authorities:
        session.verify = authorities
    endpoint = _pip("index-url")
    return PyPISimple(endpoint, session=session) if endpoint else PyPISimple(session=session)


def _pip(option: str) -> str:
    """An option of pip, from its environment variable or its configuration files; empty if it is not set."""
    variable = "PIP_" + option.upper().replace("-", "_")
    if os.environ.get(variable):
        return os.environ[variable]
    argv = [sys.executable, "-m", "pip", "config", "get", f"global.{option}"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()


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
    """Unpack an archive that nobody vouches for: nothing of it lands outside of the folder, or is a device. Blocks."""
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
    """What the data filter does, for Python before 3.11.4: nothing that leads outside, no devices, no set-user bits."""
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
