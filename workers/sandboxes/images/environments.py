"""Python for a sandbox: an environment with exactly the requested packages, made once per node, bound read-only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from farm.errors import SandboxError
from farm.settings import settings
from workers.sandboxes.images.content_store import digest, made_in_place
from workers.sandboxes.images.image import Image

INSTALL_S = 900.0
"""Seconds after which each of the two commands that make an environment is killed, with all that it has started."""
AGENT_FOLDER = "/opt/farm/agent"
"""The path in a sandbox of the environment of the agent that runs inside, if it has one."""


@dataclass(frozen=True, slots=True)
class PythonEnvironment:
    """Pairs of source and target to bind, and the folders that go first on PATH; both may be empty."""

    binds: tuple[tuple[str, str], ...] = ()
    bin_folders: tuple[str, ...] = ()


def environment(
    packages: Sequence[str], image: Image, install_s: float = INSTALL_S, *, alone: bool = False
) -> PythonEnvironment:
    """Find or make it. Raises SandboxError. Blocks; the first time for as long as the installation takes.

    `alone`: of the packages nothing is installed that they declare to need.
    """
    base = sys.base_prefix
    if base == "/usr" and not image.system:
        # the host's /usr cannot be bound over the image's
        if packages:
            raise SandboxError(
                "packages in an image of its own need a Python with a folder of its own, and the farm runs on the "
                "system's: run it with one from pyenv, uv or conda"
            )
        return PythonEnvironment()
    name = digest("environment", sorted(packages), sys.version, base, *(["alone"] if alone else []))
    asked_at = time.time()
    path = settings().cache / "environments" / name

    def make(folder: Path) -> None:
        _make(folder, [*(["--no-deps"] if alone else []), *packages] if packages else [], asked_at, install_s)

    folder = made_in_place(path, make, within_s=2 * install_s)
    binds = [(str(folder), str(folder))]
    if not (image.system and base == "/usr"):
        binds.append((base, base))
    return PythonEnvironment(tuple(binds), (str(folder / "bin"),))


def agent_environment(packages: Sequence[str], image: Image) -> PythonEnvironment:
    """Return the environment of an agent inside, as `environment` does, but at a path of its own and not on PATH.

    So the programs that the agent runs are the instance's, as they would be without it.
    """
    if not packages:
        return PythonEnvironment()
    result = environment(packages, image)
    # at its own path too, which its scripts name as their interpreter's
    return PythonEnvironment(((result.binds[0][0], AGENT_FOLDER), *result.binds))


def _make(folder: Path, words: Sequence[str], asked_at: float, install_s: float) -> None:
    """Install it. A failure is that of all that waited for it: one by one, the last would take hours to fail."""
    note = folder.with_name(folder.name + ".failed")
    if note.exists() and note.stat().st_mtime >= asked_at:
        raise SandboxError(note.read_text())
    try:
        _install(folder, words, install_s)
    except SandboxError as error:
        # the disk may be full
        with suppress(OSError):
            note.write_text(str(error))
        raise
    note.unlink(missing_ok=True)


def _install(folder: Path, words: Sequence[str], install_s: float) -> None:
    interpreter = getattr(sys, "_base_executable", sys.executable)
    _run([interpreter, "-m", "venv", "--without-pip", str(folder)], "cannot be made", install_s)
    if words:
        command = ["install", "--no-input", "--disable-pip-version-check", "--quiet", *words]
        _run(
            [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), *command],
            ", ".join(words),
            install_s,
        )


def _run(command: Sequence[str], what: str, within_s: float) -> None:
    # one that outlived this process would write into what the next one makes
    bound = ["setpriv", "--pdeathsig", "KILL", "--", *command]
    with subprocess.Popen(
        bound, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=within_s)
        except BaseException as error:
            # and so would the programs that build packages for it
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise SandboxError(f"Python environment: {what}: not within {within_s:.0f} s") from None
            raise
    if process.returncode:
        last = " ".join((err or out).strip().splitlines()[-3:])
        raise SandboxError(f"Python environment: {what}: {last}")
