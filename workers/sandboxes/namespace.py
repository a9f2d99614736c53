"""Sandboxes without a container runtime: the monitor creates the namespaces and the overlay itself.

A probe tells, once per process, whether this node can run sandboxes, with the system calls that a sandbox needs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import ClassVar, TypeAlias

from farm.errors import SandboxError
from workers.config import SandboxConfig
from workers.sandboxes import cgroups
from workers.sandboxes.isolation.fork_requests import program_of
from workers.sandboxes.provider import NodeSandboxProvider
from workers.sandboxes.sandbox_user import give, sandbox_user

PROGRAMS = ("bash", "setpriv", "unshare", "rm")
_SWITCHES = {
    "kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
    "user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=10000"),
}
_N_TRIES = 3
_TIMEOUT_S = 60.0
_TRY = program_of("workers.sandboxes.isolation.namespace_probe")


@cache
def namespaces_missing(config: SandboxConfig) -> str:
    """Return why sandboxes cannot run here and how to fix that; empty if they can. The first call blocks for 50 ms."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if sys.platform != "linux" or missing:
        return f"needs Linux with {', '.join(missing)}: install bash, coreutils and util-linux"
    for switch, (off, remedy) in _SWITCHES.items():
        path = Path("/proc/sys") / switch
        if path.exists() and path.read_text().strip() == off:
            return f"user namespaces are switched off: as root, {remedy}"
    try:
        done = answer_of(partial(_try, config))
    except (SandboxError, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if not done.returncode:
        return ""
    complaint = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"namespaces or overlayfs do not work for ordinary users (Linux 5.12 is needed): {complaint}"


Answer: TypeAlias = "subprocess.CompletedProcess[str]"


def answer_of(ask: Callable[[], Answer]) -> Answer:
    """Return the result of a probe program.

    It is run again if a signal ended it, for example one that was sent to all processes of the node.
    """
    for _ in range(_N_TRIES):
        answer = ask()
        if answer.returncode >= 0:
            break
    return answer


def run(argv: Sequence[str]) -> Answer:
    """Run a program to its end. Raises OSError, subprocess.TimeoutExpired."""
    return subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd="/")


def _try(config: SandboxConfig) -> Answer:
    config.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=config.scratch, ignore_cleanup_errors=True) as name:
        base = Path(name)
        for folder in ("lower/folder", "upper", "work", "root"):
            (base / folder).mkdir(parents=True)
        (base / "lower/folder/file").touch()
        give(base, config.user)
        user = sandbox_user(config.user) or ()
        done = run([sys.executable, "-I", "-S", "-c", _TRY, str(Path(__file__).parents[2]), name, *map(str, user)])
        # overlayfs leaves a folder that only root of the owner's user namespace can enter
        shutil.rmtree(base / "work", onerror=lambda _, path, __: Path(path).chmod(0o700))
        return done


class NamespaceProvider(NodeSandboxProvider):
    """See `workers.plugins.interfaces.SandboxProvider`."""

    kind: ClassVar[str] = "namespace"
    priority: ClassVar[int] = 10

    def missing(self) -> str:
        return namespaces_missing(self.config) or cgroups.missing(self.config)
