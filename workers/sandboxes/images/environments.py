"""Python environments for sandboxes with exactly the requested packages: created once per node, bound read-only.

Their Python is the farm's own, a newer installed one, or one of uv.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from farm.errors import SandboxError
from workers.config import SandboxConfig
from workers.sandboxes.images.content_store import digest, failing_alike, fingerprint, is_complete, made_in_place, used
from workers.sandboxes.images.image import Image
from workers.sandboxes.processes.process_tree import MARK, kill_tagged, new_tag

INSTALL_S = 900.0
"""Time limit of each of the two commands that create an environment, after which it is killed with its children."""

AGENT_FOLDER = "/opt/farm/agent"
"""The path in a sandbox of the environment of an agent that runs inside."""

_NEWER = 6
"""The number of minor versions to try, starting with the oldest allowed one."""
_INSTALL_S = 300.0


@dataclass(frozen=True, slots=True)
class PythonEnvironment:
    """Pairs of source and target to bind, and the folders at the front of PATH; both may be empty."""

    binds: tuple[tuple[str, str], ...] = ()
    bin_folders: tuple[str, ...] = ()
    roots: tuple[Path, ...] = ()
    """The cache folders to hold while it is used."""


def environment(
    config: SandboxConfig,
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
    path = _path_of(config, packages, base, version, without_dependencies)

    def make(folder: Path) -> None:
        with failing_alike(folder, requested_at):
            # pip checks the digest of a URL
            words = [f"file://{package}" if package.startswith("/") else package for package in packages]
            words = ["--no-deps", *words] if without_dependencies and words else words
            _install(interpreter, folder, words, install_s)

    folder = used(made_in_place(path, make, within_s=2 * install_s))
    binds = [(str(folder), str(folder))]
    if not (image.system and base == "/usr"):
        binds.append((base, base))
    return PythonEnvironment(tuple(binds), (str(folder / "bin"),), (folder,))


def is_made(config: SandboxConfig, packages: Sequence[str], *, without_dependencies: bool = False) -> bool:
    """Return whether this node has the environment of the farm's own Python, so that nothing must be fetched."""
    _, base, version = interpreter_for("")
    return is_complete(_path_of(config, packages, base, version, without_dependencies))


def _path_of(
    config: SandboxConfig, packages: Sequence[str], base: str, version: str, without_dependencies: bool
) -> Path:
    contents = sorted(_content(package, config.digests_folder) for package in packages)
    name = digest("environment", contents, version, base, *(["alone"] if without_dependencies else []))
    return config.environments_folder / name


def agent_environment(
    config: SandboxConfig, packages: Sequence[str], image: Image, python: str = "", *, always: bool = False
) -> PythonEnvironment:
    """Return an agent's environment, like `environment`, but at its own path and not on PATH.

    So the programs that the agent runs are those of the instance. `always`: return one even without packages, if the
    image supports it.
    """
    if not packages and not always:
        return PythonEnvironment()
    base = environment(config, packages, image, python=python)
    if not base.binds:
        return base
    # also bound at its original path, which its scripts name as their interpreter
    return PythonEnvironment(((base.binds[0][0], AGENT_FOLDER), *base.binds), (), base.roots)


def _content(package: str, digests: Path) -> str:
    """Return a package for the key; a wheel with its digest, because a file name can be reused. Raises SandboxError."""
    if not package.startswith("/"):
        return package
    try:
        return f"{Path(package).name} {fingerprint(Path(package.partition('#')[0]), digests)}"
    except OSError as error:
        raise SandboxError(f"Python environment: {package} cannot be read on this node: {error}") from error


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


def run_installer(
    command: Sequence[str],
    what: str,
    within_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    summary: Callable[[str], str] = lambda output: " ".join(output.strip().splitlines()[-3:]),
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


def interpreter_for(oldest: str) -> tuple[str, str, str]:
    """Return a Python of this node, its prefix and version: the farm's, if it is new enough. Raises SandboxError.

    Otherwise it is one on PATH, one next to the farm's own (where pyenv and uv keep all of theirs), or one of uv.
    """
    wanted = tuple(map(int, oldest.split("."))) if oldest else (0, 0)
    if sys.version_info[:2] >= wanted:
        return getattr(sys, "_base_executable", sys.executable), sys.base_prefix, sys.version
    for interpreter in _installed(wanted[1]):
        if known := _probed(interpreter):
            return known
    return _of_uv(oldest)


def _installed(minor: int) -> Iterator[str]:
    """Yield the commands of candidate Pythons, the oldest version first."""
    siblings = Path(sys.base_prefix).parent
    for each in range(minor, minor + _NEWER):
        if interpreter := shutil.which(f"python3.{each}"):
            yield interpreter
        if siblings != Path("/"):
            yield from map(str, sorted(siblings.glob(f"*/bin/python3.{each}")))


@cache
def _probed(interpreter: str) -> tuple[str, str, str] | None:
    code = "import json, sys; print(json.dumps([sys._base_executable, sys.base_prefix, sys.version]))"
    try:
        done = subprocess.run([interpreter, "-I", "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        # e.g. a Python for another machine type
        return None
    return tuple(json.loads(done.stdout)) if done.returncode == 0 else None


@cache
def _of_uv(oldest: str) -> tuple[str, str, str]:
    """Return a Python of uv, which installs it if necessary. Raises SandboxError, also if there is no uv."""
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        raise _missing(oldest, "")
    words = [uv, "python", "find", "--managed-python", "--no-project", oldest]
    search = _run(words)
    if search.returncode:
        installing = _run([uv, "python", "install", oldest])
        if installing.returncode:
            raise _missing(oldest, f"; uv could not install one: {_last_line(installing.stderr)}")
        search = _run(words)
    known = _probed(search.stdout.strip()) if search.returncode == 0 else None
    if known is None:
        raise _missing(oldest, f"; that of uv does not run: {_last_line(search.stderr)}")
    return known


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"not within {_INSTALL_S:.0f} s")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1].strip()


def _missing(oldest: str, why: str) -> SandboxError:
    version = ".".join(map(str, sys.version_info[:2]))
    return SandboxError(
        f"Python environment: a Python {oldest} or newer is needed, and this node has none besides the farm's own, "
        f"{version}{why}: install one with `uv python install {oldest}` or `pyenv install {oldest}`, or put a "
        f"python{oldest} on the node's PATH"
    )
