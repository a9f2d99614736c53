"""The package index that pip uses here, and the download of a source archive by its digest."""

from __future__ import annotations

import hashlib
import os
import ssl
import subprocess
import sys
from pathlib import Path

import requests
from pypi_simple import DistributionPackage, NoSuchProjectError, PyPISimple, UnsupportedContentTypeError

from farm.errors import SandboxError
from farm.records.request import Archive

FETCH_S = 300.0


def fetch(archive: Archive, folder: Path) -> Path:
    """Download an archive from the index that pip uses here, and check its digest. Raises SandboxError.

    pip itself would run the archive's build script to get its metadata, and archives must not run outside a sandbox.
    """
    what = f"archive {archive.name} {archive.version}"
    try:
        with _index() as index:
            package = _source(index, archive)
            if package is None:
                raise SandboxError(f"{what}: the package index has no source archive with sha256 {archive.sha256}")
            path = folder / package.filename
            index.download_package(package, path, verify=False, timeout=FETCH_S)
    except (requests.RequestException, NoSuchProjectError, UnsupportedContentTypeError) as error:
        raise SandboxError(f"{what} could not be fetched: {error}") from error
    if hashlib.sha256(path.read_bytes()).hexdigest() != archive.sha256:
        raise SandboxError(f"{what}: the digest of the package index's file is not {archive.sha256}")
    return path


def _source(index: PyPISimple, archive: Archive) -> DistributionPackage | None:
    """Return the index's file by its digest, or by its version if the index has no digests. None if there is none."""
    page = index.get_project_page(archive.name, timeout=FETCH_S)
    sources = [package for package in page.packages if package.package_type == "sdist"]
    for package in sources:
        if package.digests.get("sha256") == archive.sha256:
            return package
    unhashed = [package for package in sources if package.version == archive.version and not package.digests]
    return unhashed[0] if unhashed else None


def _index() -> PyPISimple:
    """Return the index that pip is configured to use, trusted like pip does: by its CA file, or the system's."""
    session = requests.Session()
    authorities = _pip("cert")
    if not authorities and not {"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"} & os.environ.keys():
        authorities = ssl.get_default_verify_paths().cafile or ""
    if authorities:
        session.verify = authorities
    endpoint = _pip("index-url")
    return PyPISimple(endpoint, session=session) if endpoint else PyPISimple(session=session)


def _pip(option: str) -> str:
    """Return an option of pip, from its environment variable or its configuration files; empty if it is not set."""
    variable = "PIP_" + option.upper().replace("-", "_")
    if os.environ.get(variable):
        return os.environ[variable]
    argv = [sys.executable, "-m", "pip", "config", "get", f"global.{option}"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
