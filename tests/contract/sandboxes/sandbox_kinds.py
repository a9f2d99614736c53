"""The kinds of sandbox that the promises are tried on, and where the tests keep what they make."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from farm.settings import settings
from workers.interfaces import SandboxProvider
from workers.sandboxes.namespace import NamespaceProvider
from workers.sandboxes.singularity import SingularityProvider
from workers.testing.fakes import FakeProvider
from workers.testing.local_sandbox import LocalProvider

PROVIDERS: dict[str, Callable[[], SandboxProvider]] = {
    "namespace": NamespaceProvider,
    "singularity": SingularityProvider,
}
FAKES: dict[str, Callable[[], SandboxProvider]] = {"local": LocalProvider, "fake": FakeProvider}
"""These keep the promises of the group `surface`; the last, in which no program runs, only those of files."""

SANDBOX_IDS = "1879100000:60000"
"""Unassigned user ids; tests of a lack of them set others."""


@contextmanager
def farm_in(folder: Path) -> Iterator[None]:
    """The farm's home and scratch below a folder, for this process and those it starts."""
    new = {"FARM_HOME": str(folder / "home"), "FARM_SCRATCH": str(folder / "scratch"), "FARM_SANDBOX_IDS": SANDBOX_IDS}
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    settings.cache_clear()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        settings.cache_clear()


def own_seconds() -> str:
    """A time to sleep by which a sleeper is known among all of the machine, those of other test runs included."""
    return f"4711.{os.getpid()}{time.monotonic_ns()}"


def processes_with(text: str) -> list[str]:
    """Command lines of living processes of this machine in which a text occurs.

    One in uninterruptible sleep is left out: whoever asks about it may wait as long as it does.
    """
    result = []
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or (entry / "stat").read_text().rpartition(")")[2].split()[0] == "D":
                continue
            if text.encode() in (line := (entry / "cmdline").read_bytes()):
                result.append(line.replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return result


def mounts_with(text: str) -> list[str]:
    """Mounts of this machine in which a text occurs."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if text in line]


def python(code: str, pass_fds: Sequence[int] = (), **env: str) -> subprocess.Popen[str]:
    """Another process of this farm that runs some code."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
        cwd=Path(__file__).parents[3],
    )
