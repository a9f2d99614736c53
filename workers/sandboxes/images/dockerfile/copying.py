"""COPY and ADD: files of the context, of heredocs, of other stages and of URLs, into a stage.

The node downloads a URL while it creates the layer, if builds have network.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import tarfile
import tempfile
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote, urlsplit

from farm.errors import ImageError
from workers.config import SandboxConfig
from workers.sandboxes.images.building.builder import BUILD_S
from workers.sandboxes.images.dockerfile.context import (
    ContextFile,
    applied,
    copy_files,
    digest_of,
    ignore_patterns,
    ignores,
    is_pattern,
)
from workers.sandboxes.images.dockerfile.instructions import Instruction
from workers.sandboxes.images.dockerfile.steps import CopyFiles, FromAddress, FromContext, FromStage, FromText

if TYPE_CHECKING:
    from workers.sandboxes.build_sandbox import BuildSandbox, Owner

# NUL separates names, because no name contains it; only matches of the pattern's own wildcards are split
_NAMED = (
    'IFS=; shopt -s nullglob; for each in $1; do [ -e "$each" ] || [ -L "$each" ] && printf \'%s\\0\' "$each"; done'
)
_INSIDE = 'shopt -s nullglob dotglob; for each in "$1"/*; do printf \'%s\\0\' "$each"; done'
# deletes from a sandbox that only this copy uses
_EXCLUDE = 'IFS=; shopt -s nullglob dotglob globstar; cd -- "$1" && for each in $2; do rm -rf -- "$each"; done'
_BELOW = (
    'IFS=; shopt -s nullglob dotglob globstar; cd -- "$1" && '
    'for each in $2; do [ -e "$each" ] || [ -L "$each" ] && printf \'%s\\0\' "$each"; done'
)

OpenStage: TypeAlias = "Callable[[FromStage], BuildSandbox]"

MODE = 0o600
"""The permissions of such a file without `--chmod`."""

_URL = re.compile(r"https?://")
_GIT = re.compile(r"(git|ssh)://|git@|https?://\S+\.git([#?]|$)|github\.com/[^/]+/[^/]+$")
_CHECKSUM = re.compile(r"(sha256|sha384|sha512):([0-9a-f]+)")
_CONNECT_S = 30.0
_BUSY = {408, 429, 500, 502, 503, 504}


def copy_into(
    config: SandboxConfig,
    sandbox: BuildSandbox,
    work: CopyFiles,
    instruction: Instruction,
    open_stage: OpenStage,
    owner: Owner | None,
) -> None:
    """Copy all sources. ImageError for one that is missing or has changed since the build was planned. Blocks.

    Without an owner, files from stages and tars keep theirs, and others belong to root.
    """
    into = work.into or sandbox.is_folder(work.target)
    with tempfile.TemporaryDirectory() as name:
        for number, source in enumerate(work.sources):
            staged = Path(name, str(number))
            if isinstance(source, FromText):
                staged.write_text(source.text)
                staged.chmod(applied(work.mode, 0o644, is_folder=False))
                _upload(sandbox, staged, source.name, work.target, into, owner)
            elif isinstance(source, FromAddress):
                fetch(config, source, staged, instruction)
                staged.chmod(applied(work.mode, MODE, is_folder=False))
                if instruction.switch("unpack") and tarfile.is_tarfile(staged):
                    sandbox.unpack(staged, work.target, owner)
                else:
                    _upload(sandbox, staged, source.name, work.target, into, owner)
            elif isinstance(source, FromContext):
                copy_files(source.files, staged, work.mode)
                copied = [_moved(file, staged) for file in source.files]
                if work.mode is None and digest_of(copied, config.digests_folder) != source.digest:
                    raise ImageError(f"{source.name} was changed while it was copied", retryable=True)
                if work.unpack and staged.is_file() and tarfile.is_tarfile(staged):
                    sandbox.unpack(staged, work.target, owner)
                else:
                    _upload(sandbox, staged, posixpath.basename(source.name), work.target, into, owner)
            else:
                _copy_stage(sandbox, open_stage(source), source, work, instruction, into, owner)


def _moved(file: ContextFile, staged: Path) -> ContextFile:
    path = staged / file.relative if file.relative else staged
    return ContextFile(file.relative, path, path.lstat().st_mode)


def _upload(sandbox: BuildSandbox, staged: Path, name: str, target: str, into: bool, owner: Owner | None) -> None:
    sandbox.upload(staged, posixpath.join(target, name) if into and not staged.is_dir() else target, owner)


def _copy_stage(
    sandbox: BuildSandbox,
    other: BuildSandbox,
    source: FromStage,
    work: CopyFiles,
    instruction: Instruction,
    into: bool,
    owner: Owner | None,
) -> None:
    if other.bare and (work.mode is not None or work.parents or work.excluded):
        raise instruction.refused("--chmod, --parents and --exclude need a shell in the stage that it copies from")
    copied = []
    for name, target in _pairs(other, source, work, instruction, into):
        sandbox.copy_from(other, name, target, owner, whole=work.parents)
        if work.mode is not None and not work.parents and other.is_folder(name):
            copied += [posixpath.join(target, posixpath.basename(each)) for each in _names(other, _INSIDE, name)]
        else:
            copied.append(target)
    if work.mode is not None and copied:
        written = work.mode if isinstance(work.mode, str) else f"{work.mode:o}"
        done = sandbox.run(["bash", "-c", 'umask 0; exec chmod -R "$@"', "bash", written, "--", *copied])
        if done.code:
            raise instruction.refused(f"--chmod: {done.output.strip()[-200:]}")


def _pairs(
    other: BuildSandbox, source: FromStage, work: CopyFiles, instruction: Instruction, into: bool
) -> list[tuple[str, str]]:
    """Return the sources with their target paths. Excluded files are deleted in the other sandbox."""
    missing = instruction.refused(f"there is no {source.path} in what it copies from")
    if work.parents:
        pairs = _pairs_with_parents(other, source, work, instruction)
        if not pairs and not is_pattern(source.path):
            raise missing
        return pairs
    path = source.path.rstrip("/") or "/"
    if other.bare and is_pattern(path):
        raise instruction.refused("a pattern needs a shell in the stage that it copies from")
    names = [path for _ in range(other.has(path))] if other.bare else _names(other, _NAMED, path)
    if not names and not is_pattern(source.path):
        raise missing
    pairs = []
    patterns = tuple(ignore_patterns("\n".join(work.excluded)))
    for name in names:
        if other.is_folder(name):
            _exclude(other, name, work, instruction)
            pairs.append((name, work.target))
        elif not ignores(patterns, posixpath.basename(name)):
            pairs.append((name, posixpath.join(work.target, posixpath.basename(name)) if into else work.target))
    return pairs


def _pairs_with_parents(
    other: BuildSandbox, source: FromStage, work: CopyFiles, instruction: Instruction
) -> list[tuple[str, str]]:
    pivot, mark, inside = source.path.partition("/./")
    pairs = []
    for above in _names(other, _NAMED, (pivot or "/") if mark else "/"):
        _exclude(other, above, work, instruction)
        for name in _names(other, _BELOW, above, (inside if mark else source.path).strip("/") or "."):
            target = posixpath.normpath(posixpath.join(work.target, name))
            pairs.append((posixpath.join(above, name), target))
    return pairs


def _exclude(other: BuildSandbox, folder: str, work: CopyFiles, instruction: Instruction) -> None:
    """Delete excluded files from a folder of the other sandbox, which only this copy uses."""
    for pattern in work.excluded:
        if pattern.startswith("!"):
            raise instruction.refused(f"--exclude={pattern}: exceptions are not supported for files of another stage")
        clean = posixpath.normpath("/" + pattern).lstrip("/")
        done = other.run(["bash", "-c", _EXCLUDE, "bash", folder, clean])
        if done.code:
            raise instruction.refused(f"--exclude={pattern}: {done.output.strip()[-200:]}")


def _names(sandbox: BuildSandbox, script: str, *arguments: str) -> list[str]:
    output = sandbox.run(["bash", "-c", script, "bash", *arguments]).output
    return [name for name in output.split("\0") if name]


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


def fetch(config: SandboxConfig, source: FromAddress, path: Path, instruction: Instruction) -> None:
    """Download the file to a new path. ImageError, which is retryable if the file may be available later. Blocks."""
    if not config.build_network:
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
    try:
        seconds = parsedate_to_datetime(changed).timestamp()
    except ValueError:
        return
    os.utime(path, (seconds, seconds))
