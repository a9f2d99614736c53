"""Python environments for sandboxes with exactly the requested packages: created once per node, bound read-only."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from farm.errors import SandboxError
from farm.settings import settings
from workers.sandboxes.images.building.interpreters import interpreter_for
from workers.sandboxes.images.content_store import digest, failing_alike, is_complete, made_in_place, used
from workers.sandboxes.images.fingerprints import fingerprint
from workers.sandboxes.images.image import Image
from workers.sandboxes.processes.process_tree import MARK, kill_tagged, new_tag

INSTALL_S = 900.0
"""Time limit of each of the two commands that create an environment, after which it is killed with its children."""

AGENT_FOLDER = "/opt/farm/agent"
"""The path in a sandbox of the environment of an agent that runs inside."""


@dataclass(frozen=True, slots=True)
class PythonEnvironment:
    """Pairs of source and target to bind, and the folders at the front of PATH; both may be empty."""

    binds: tuple[tuple[str, str], ...] = ()
    bin_folders: tuple[str, ...] = ()
    roots: tuple[Path, ...] = ()
    """The cache folders to hold while it is used."""


def environment(
    packages: Sequence[str],
    image: Image,
    install_s: float = INSTALL_S,
    *,
    without_dependencies: bool = False,
    python: str = "",
) -> PythonEnvironment:
    """Find or create an environment. Raises SandboxError. Blocks, the first time as long as the installation takes.

    `packages` are exact requirements or paths of wheels; `without_dependencies` installs only these. `python`: the
    minimum version, used if the farm's own is older.
    """
    interpreter, base, version = interpreter_for(python)
    if base == "/usr" and not image.system:
        # the host's /usr cannot be bound over the image's
        if packages:
            raise SandboxError(
                "packages in an image with its own /usr need a Python in a separate folder, and the farm runs on the "
                "system's: run the farm with one from pyenv, uv or conda"
            )
        return PythonEnvironment()
    requested_at = time.time()
    path = _place(packages, base, version, without_dependencies)

    def make(folder: Path) -> None:
        with failing_alike(folder, requested_at):
            words = [*(["--no-deps"] if without_dependencies else []), *map(_word, packages)] if packages else []
            _install(interpreter, folder, words, install_s)

    folder = used(made_in_place(path, make, within_s=2 * install_s))
    binds = [(str(folder), str(folder))]
    if not (image.system and base == "/usr"):
        binds.append((base, base))
    return PythonEnvironment(tuple(binds), (str(folder / "bin"),), (folder,))


def is_made(packages: Sequence[str], *, without_dependencies: bool = False) -> bool:
    """Return whether this node has the environment of the farm's own Python, so that nothing must be fetched."""
    _, base, version = interpreter_for("")
    return is_complete(_place(packages, base, version, without_dependencies))


def _place(packages: Sequence[str], base: str, version: str, without_dependencies: bool) -> Path:
    name = digest(
        "environment", sorted(map(_content, packages)), version, base, *(["alone"] if without_dependencies else [])
    )
    return settings().cache / "environments" / name


def agent_environment(
    packages: Sequence[str], image: Image, python: str = "", *, always: bool = False
) -> PythonEnvironment:
    """Return an agent's environment, like `environment`, but at its own path and not on PATH.

    So the programs that the agent runs are those of the instance. `always`: return one even without packages, if the
    image supports it.
    """
    if not packages and not always:
        return PythonEnvironment()
    result = environment(packages, image, python=python)
    if not result.binds:
        return result
    # also bound at its original path, which its scripts name as their interpreter
    return PythonEnvironment(((result.binds[0][0], AGENT_FOLDER), *result.binds), (), result.roots)


def _content(package: str) -> str:
    """Return a package for the key; a wheel with its digest, because a file name can be reused. Raises SandboxError."""
    if not package.startswith("/"):
        return package
    try:
        return f"{Path(package).name} {fingerprint(Path(package.partition('#')[0]))}"
    except OSError as error:
        raise SandboxError(f"Python environment: {package} cannot be read on this node: {error}") from error


def _word(package: str) -> str:
    """Return a package as an argument of pip, which checks the digest of a URL."""
    return f"file://{package}" if package.startswith("/") else package


def _install(interpreter: str, folder: Path, words: Sequence[str], install_s: float) -> None:
    run_installer(
        [interpreter, "-m", "venv", "--without-pip", str(folder)], "Python environment: cannot be made", install_s
    )
    if words:
        command = ["install", "--no-input", "--disable-pip-version-check", "--quiet", *words]
        run_installer(
            [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), *command],
            f"Python environment: {', '.join(words)}",
            install_s,
        )


def _last_lines(output: str) -> str:
    return " ".join(output.strip().splitlines()[-3:])


def run_installer(
    command: Sequence[str],
    what: str,
    within_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    summary: Callable[[str], str] = _last_lines,
) -> None:
    """Run a command to its end and kill its remaining children. Raises SandboxError with its output by `summary`."""
    # a child that outlived this process would write into the next attempt's folder
    bound = ["setpriv", "--pdeathsig", "KILL", "--", *command]
    mark = new_tag()
    env = {**(os.environ if env is None else env), MARK: mark}
    with subprocess.Popen(
        bound, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=cwd, env=env
    ) as process:
        try:
            out, err = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            raise SandboxError(f"{what}: not finished within {within_s:.0f} s") from None
        finally:
            # the same holds for programs that build packages for it
            kill_tagged(mark)
    if process.returncode:
        raise SandboxError(f"{what}: {summary(err or out)}")
