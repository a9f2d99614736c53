"""A Python of this node for environments: the farm's own, a newer installed one, or one of uv."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from farm.errors import SandboxError

_NEWER = 6
"""The number of minor versions to try, starting with the oldest allowed one."""
_INSTALL_S = 300.0


def interpreter_for(oldest: str) -> tuple[str, str, str]:
    """Return a Python of this node, its prefix and version: the farm's, if it is new enough. Raises SandboxError.

    Otherwise it is one on PATH, one next to the farm's own (where pyenv and uv keep all of theirs), or one of uv.
    """
    wanted = tuple(map(int, oldest.split("."))) if oldest else (0, 0)
    if sys.version_info[:2] >= wanted:
        return getattr(sys, "_base_executable", sys.executable), sys.base_prefix, sys.version
    for found in _installed(wanted[1]):
        if known := _probed(found):
            return known
    return _of_uv(oldest)


def _installed(minor: int) -> Iterator[str]:
    """Yield the commands of candidate Pythons, the oldest version first."""
    siblings = Path(sys.base_prefix).parent
    for each in range(minor, minor + _NEWER):
        if found := shutil.which(f"python3.{each}"):
            yield found
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
    found = _run(words)
    if found.returncode:
        installing = _run([uv, "python", "install", oldest])
        if installing.returncode:
            raise _missing(oldest, f"; uv could not install one: {_last_line(installing.stderr)}")
        found = _run(words)
    known = _probed(found.stdout.strip()) if found.returncode == 0 else None
    if known is None:
        raise _missing(oldest, f"; that of uv does not run: {_last_line(found.stderr)}")
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
