"""Files that ADD names by URL: downloaded by the node while a layer is created, if builds have network."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit

from farm.errors import ImageError
from farm.settings import settings
from workers.sandboxes.images.building.builder import BUILD_S
from workers.sandboxes.images.dockerfile.instructions import Instruction
from workers.sandboxes.images.dockerfile.steps import FromAddress

MODE = 0o600
"""The permissions of such a file without `--chmod`."""

_URL = re.compile(r"https?://")
_GIT = re.compile(r"(git|ssh)://|git@|https?://\S+\.git([#?]|$)|github\.com/[^/]+/[^/]+$")
_CHECKSUM = re.compile(r"(sha256|sha384|sha512):([0-9a-f]+)")
_CONNECT_S = 30.0
_BUSY = {408, 429, 500, 502, 503, 504}


def is_address(source: str) -> bool:
    """Return whether a source of ADD is the URL of a file. ValueError for a git repository."""
    if _GIT.match(source):
        raise ValueError("ADD of a git repository is not supported: clone it by RUN, in a build with --network")
    return _URL.match(source) is not None


def remote_file(address: str, checksum: str) -> FromAddress:
    """Return a source of ADD by its URL; `checksum` as in the flag, empty for any. Raises ValueError."""
    if checksum and not _CHECKSUM.fullmatch(checksum):
        raise ValueError(f"--checksum={checksum}: it must be sha256: and the digest in hexadecimal digits")
    name = posixpath.basename(unquote(urlsplit(address).path))
    return FromAddress(address, name or "__unnamed__", checksum)


def fetch(source: FromAddress, path: Path, instruction: Instruction) -> None:
    """Download the file to a new path. ImageError, which is retryable if the file may be available later. Blocks."""
    if not settings().build_network:
        advice = "allow it by FARM_BUILD_NETWORK=1, or `farm images build --network`"
        raise instruction.refused(f"builds have no network: {advice}")
    # imported here, because it loads slowly and few processes download
    import httpx2

    algorithm, _, wanted = source.checksum.partition(":")
    digest, deadline = hashlib.new(algorithm or "sha256"), time.monotonic() + BUILD_S
    try:
        with (
            httpx2.Client(follow_redirects=True, timeout=_CONNECT_S) as client,
            client.stream("GET", source.address) as answer,
            path.open("wb") as file,
        ):
            if answer.status_code != 200:
                failed = instruction.refused(f"{source.address} answered {answer.status_code}")
                raise ImageError(failed.message, retryable=answer.status_code in _BUSY)
            for chunk in answer.iter_bytes():
                digest.update(chunk)
                file.write(chunk)
                if time.monotonic() > deadline:
                    raise ImageError(f"{source.address} was not fetched within {BUILD_S:.0f} s", retryable=True)
            changed = answer.headers.get("last-modified", "")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        failed = instruction.refused(f"{source.address} could not be fetched: {error}")
        raise ImageError(failed.message, retryable=not isinstance(error, httpx2.InvalidURL)) from error
    if wanted and digest.hexdigest() != wanted:
        raise instruction.refused(f"{source.address} has the checksum {algorithm}:{digest.hexdigest()}")
    _set_time(path, changed)


def _set_time(path: Path, changed: str) -> None:
    """Set a file's modification time to the one that the server reports."""
    try:
        seconds = parsedate_to_datetime(changed).timestamp()
    except ValueError:
        return
    os.utime(path, (seconds, seconds))
