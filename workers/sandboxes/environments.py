"""Python for a sandbox: an environment with exactly the packages asked for, made once per node, bound read-only."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from farm.errors import SandboxError
from farm.settings import settings
from workers.sandboxes.content import digest, made_in_place
from workers.sandboxes.images import Image

INSTALL_S = 900.0
AGENT_FOLDER = "/opt/farm/agent"
"""Where a sandbox sees the environment of the agent that runs inside, if it has one."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What is bound, at the same path as on the host, and which folder goes first on PATH; both may be empty."""

    binds: tuple[tuple[str, str], ...] = ()
    bin_folders: tuple[str, ...] = ()


def environment(packages: Sequence[str], image: Image) -> Environment:
    """Find or make it. Raises SandboxError. Blocks; the first time for as long as the installation takes."""
    base = sys.base_prefix
    if base == "/usr" and not image.system:
        # the host's /usr cannot be bound over the image's
        if packages:
            raise SandboxError(
                "packages in an image of its own need a Python with a folder of its own, and the farm runs on the "
                "system's: run it with one from pyenv, uv or conda"
            )
        return Environment()
    name = digest("environment", sorted(packages), sys.version, base)
    asked_at = time.time()
    folder = made_in_place(settings().cache / "environments" / name, lambda path: _make(path, packages, asked_at))
    binds = [(str(folder), str(folder))]
    if not (image.system and base == "/usr"):
        binds.append((base, base))
    return Environment(tuple(binds), (str(folder / "bin"),))


def agent_environment(packages: Sequence[str], image: Image) -> Environment:
    """As `environment`, for an agent inside: found by a path of its own, and not by those who search PATH.

    So the programs that the agent runs are the instance's, as they would be without it.
    """
    if not packages:
        return Environment()
    found = environment(packages, image)
    # at its own path too, which its scripts name as their interpreter's
    return Environment(((found.binds[0][0], AGENT_FOLDER), *found.binds))


def _make(folder: Path, packages: Sequence[str], asked_at: float) -> None:
    """A failure is that of all who waited for it: one after the other, the last would wait for hours to fail too."""
    note = folder.with_name(folder.name + ".failed")
    if note.exists() and note.stat().st_mtime >= asked_at:
        raise SandboxError(note.read_text())
    try:
        _install(folder, packages)
    except SandboxError as error:
        # the disk may be full
        with suppress(OSError):
            note.write_text(str(error))
        raise
    note.unlink(missing_ok=True)


def _install(folder: Path, packages: Sequence[str]) -> None:
    interpreter = getattr(sys, "_base_executable", sys.executable)
    _run([interpreter, "-m", "venv", "--without-pip", str(folder)], "cannot be made")
    if packages:
        words = ["install", "--no-input", "--disable-pip-version-check", "--quiet", *packages]
        _run([sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), *words], ", ".join(packages))


def _run(command: Sequence[str], what: str) -> None:
    # one that outlived this process would write into what the next one makes
    bound = ["setpriv", "--pdeathsig", "KILL", "--", *command]
    try:
        done = subprocess.run(bound, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise SandboxError(f"Python environment: {what}: not within {INSTALL_S:.0f} s") from None
    if done.returncode:
        last = " ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise SandboxError(f"Python environment: {what}: {last}")
