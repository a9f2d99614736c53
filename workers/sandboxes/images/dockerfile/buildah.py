"""Builds of Dockerfiles by `buildah`, if it is installed; the result is read as an OCI archive.

buildah supports all instructions, and pulls base images itself if builds have network; without network, it gets those
in the table of names. The result is a single layer here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from farm.errors import ImageError, SandboxError
from farm.settings import settings
from workers.sandboxes.images.building.builder import BUILD_S, N_LINES, is_passing

_PROXY = re.compile(r"(https?|ftp|no)_proxy", re.IGNORECASE)
# programs of a build have the same network as buildah itself
_CHROOT = ("--isolation", "chroot")


def buildah_program() -> Path:
    """Return the program. Raises SandboxError if it is not installed."""
    result = shutil.which("buildah")
    if result is None:
        raise SandboxError("no buildah on PATH: install it, or leave FARM_IMAGE_BUILDER at `own`")
    return Path(result)


def build_archive(
    folder: Path,
    file: Path,
    target: str,
    values: Mapping[str, str],
    folders: Mapping[str, Path],
    place: Path,
) -> Path:
    """Build a Dockerfile and return the OCI archive. ImageError with the last lines. Blocks.

    `folders` are the root file systems of the base images by name; `place` is an empty work folder.
    """
    if others := sorted(name for name in settings().build_env if not _PROXY.fullmatch(name)):
        raise SandboxError(
            f"{file}: buildah gives builds no variables but proxies, and FARM_BUILD_ENV has {', '.join(others)}: mount "
            "a file by FARM_BUILD_FILES, such as /etc/pip.conf, or leave FARM_IMAGE_BUILDER at `own`"
        )
    store = ["--root", str(place / "store"), "--runroot", str(place / "run"), "--storage-driver", "vfs"]
    for name, root in folders.items():
        _import(store, name, root, place)
    words = ["build", *_CHROOT, "--pull=missing" if settings().build_network else "--pull=never"]
    words += ["--format", "docker", "--file", str(file), "--tag", "built:latest"]
    words += [word for name, value in values.items() for word in ("--build-arg", f"{name}={value}")]
    words += [word for inside, path in settings().build_files.items() for word in ("--volume", f"{path}:{inside}:ro")]
    words += ["--target", target] if target else []
    _run([*store, *words, str(folder)], f"{file}: it", place)
    archive = place / "image.tar"
    _run([*store, "push", "built:latest", f"oci-archive:{archive}"], f"{file}: what buildah built", place)
    return archive


def _import(store: Sequence[str], name: str, root: Path, place: Path) -> None:
    """Create a base image from a folder, under the name that Dockerfiles use for it."""
    container = _run([*store, "from", "scratch"], name, place).strip().splitlines()[-1]
    _run([*store, "add", "--quiet", container, str(root), "/"], name, place)
    _run([*store, "commit", "--quiet", "--rm", container, name], name, place)


def _without_network() -> list[str]:
    """Return a command prefix that disables the network if builds have none. SandboxError for an ordinary user."""
    if settings().build_network:
        return []
    if os.geteuid() != 0:
        raise SandboxError("an ordinary user's buildah has the node's network: allow it by FARM_BUILD_NETWORK=1")
    return ["unshare", "--net", "--"]


def _run(words: Sequence[str], what: str, place: Path) -> str:
    bound = ["setpriv", "--pdeathsig", "KILL", "--", *_without_network(), str(buildah_program()), *words]
    log = place / "log"
    try:
        with log.open("wb") as output:
            done = subprocess.run(
                bound,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                timeout=BUILD_S,
                cwd=place,
                # not by arguments of the command, which every user of the machine can see
                env=os.environ | settings().build_env,
            )
    except subprocess.TimeoutExpired:
        raise ImageError(f"{what} could not be built by buildah within {BUILD_S:.0f} s", retryable=True) from None
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        lines = [line for line in (text + log.read_text(errors="replace")).splitlines() if line.strip()][-N_LINES:]
        raise ImageError(f"{what} could not be built by buildah", lines, retryable=is_passing(lines))
    return text
