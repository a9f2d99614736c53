"""An agent's programs as folders to bind: created once per node, identified by content, verified by digest.

A wrong digest, a broken lock file or a missing file is an error of the agent on this node, which a retry does not fix.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from farm.errors import AgentMissing, ImageError, SandboxError
from farm.records.sandbox_spec import AgentProgram
from farm.settings import settings
from workers.sandboxes.agent_programs import npm_packages
from workers.sandboxes.images.archives import BadArchive, extract
from workers.sandboxes.images.content_store import digest, failing_alike, made_once, open_to_all, used
from workers.sandboxes.images.dockerfile.build_place import StartBuild
from workers.sandboxes.images.environments import INSTALL_S
from workers.sandboxes.images.fingerprints import fingerprint
from workers.sandboxes.images.image import image
from workers.sandboxes.resource_exhaustion import shortage

FOLDER = "/opt/farm"
"""The path in a sandbox below which each program has its folder."""
_FETCH_S = 60.0
_CHUNK = 1 << 20
# the version of the way programs are created; a new number recreates all
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class BroughtPrograms:
    """Pairs of source and target to bind, and the cache folders to hold meanwhile."""

    binds: tuple[tuple[str, str], ...] = ()
    roots: tuple[Path, ...] = ()


def brought(programs: Iterable[AgentProgram], start: StartBuild | None = None) -> BroughtPrograms:
    """Find or create the programs. Blocks. Raises SandboxError; AgentMissing for a missing or wrong program."""
    binds: list[tuple[str, str]] = []
    roots: list[Path] = []
    for program in programs:
        target = f"{FOLDER}/{program.name}"
        if any(target == there for _, there in binds):
            raise AgentMissing(f"two programs of the agent are called {program.name!r}", retryable=False)
        source, held = _of_image(program, start) if program.kind == "image" else _made(program)
        binds.append((str(source), target))
        roots += held
    return BroughtPrograms(tuple(binds), tuple(roots))


def _of_image(program: AgentProgram, start: StartBuild | None) -> tuple[Path, tuple[Path, ...]]:
    try:
        result = image(program.source, start=start)
    except ImageError as error:
        if error.retryable:
            raise
        raise AgentMissing(f"program {program.name} of the agent: {error}", retryable=False) from error
    if result.layers or result.system:
        raise _wrong(
            program, "is an image of several folders, none of which has all files: save it as an archive or a .sif"
        )
    _check(program, result.key)
    return result.folder, result.roots


def _made(program: AgentProgram) -> tuple[Path, tuple[Path, ...]]:
    requested_at = time.time()
    key = _content(program)
    where = (sys.platform, platform.machine(), *platform.libc_ver()) if program.kind == "npm" else ()
    folder = settings().cache / "programs" / digest(_FORMAT, program.kind, key, where)
    make = {"npm": _install, "folder": _copy, "archive": _unpack}[program.kind]

    def made(temporary: Path) -> None:
        with failing_alike(folder, requested_at):
            make(program, temporary, key)
            open_to_all(temporary, always=True)

    result = used(made_once(folder, made, private=True, within_s=2 * INSTALL_S))
    return result, (result,)


def _content(program: AgentProgram) -> str:
    """Return the digest of a program's content. Raises AgentMissing."""
    if not program.source.startswith("/"):
        return program.digest
    try:
        key = fingerprint(Path(program.source))
    except OSError as error:
        raise _wrong(program, f"cannot be read on this node ({error})") from error
    if Path(program.source).is_dir() is not (program.kind == "folder"):
        raise _wrong(program, "is a folder" if program.kind != "folder" else "is not a folder")
    _check(program, key)
    return key


def _check(program: AgentProgram, key: str) -> None:
    if program.digest and program.digest != key:
        raise _wrong(program, f"has the digest {key}, not {program.digest}")


def _wrong(program: AgentProgram, how: str) -> AgentMissing:
    return AgentMissing(f"program {program.name} of the agent: {program.source} {how}", retryable=False)


def _install(program: AgentProgram, folder: Path, key: str) -> None:
    path = Path(program.source)
    text = path.read_bytes()
    if hashlib.sha256(text).hexdigest() != key:
        raise SandboxError(f"program {program.name} of the agent: {path} has just been changed")
    npm_packages.install(path, text.decode("utf-8", "replace"), folder)


def _copy(program: AgentProgram, folder: Path, key: str) -> None:
    source = Path(program.source)
    try:
        shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True)
    except OSError as error:
        if why := shortage(error, folder):
            raise SandboxError(f"program {program.name} of the agent could not be copied: {why}") from error
        raise _wrong(program, f"cannot be copied: {error}") from error
    if fingerprint(source) != key:
        raise SandboxError(f"program {program.name} of the agent: {source} was changed while it was copied")


def _unpack(program: AgentProgram, folder: Path, key: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.fetched.") as downloads:
        path = Path(program.source)
        if not program.source.startswith("/"):
            path = Path(downloads) / PurePosixPath(program.source.partition("?")[0]).name
            _fetch(program, path)
        try:
            extract(path, folder)
        except BadArchive as error:
            raise _wrong(program, f"cannot be unpacked: {error}") from error


def _fetch(program: AgentProgram, path: Path) -> None:
    """Download an archive and check its digest."""
    # imported here, because it loads slowly and few processes download
    import requests

    sha256 = hashlib.sha256()
    try:
        with requests.get(program.source, stream=True, timeout=_FETCH_S) as answer, path.open("wb") as file:
            answer.raise_for_status()
            for chunk in answer.iter_content(_CHUNK):
                sha256.update(chunk)
                file.write(chunk)
    except (requests.RequestException, OSError) as error:
        raise SandboxError(f"program {program.name} of the agent could not be fetched: {error}") from error
    _check(program, sha256.hexdigest())
