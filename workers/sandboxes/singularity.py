"""Sandboxes by Apptainer or Singularity, running in the foreground on an overlay of the farm.

`instance start` is not used, because it takes four times as long and keeps two more processes. Apptainer's overlay is
not used, because without `userxattr` it cannot delete folders of the image. Apptainer gets the merged folder as
writable.
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import ClassVar

from farm.errors import SandboxError
from farm.records.request import SandboxSpec
from workers.config import SandboxConfig
from workers.sandboxes import cgroups
from workers.sandboxes.images.runtime import APPTAINER_REMEDY, exec_command, exposure, program
from workers.sandboxes.isolation.monitor import MASKED
from workers.sandboxes.lifecycle.start import SOCKETS
from workers.sandboxes.namespace import answer_of, namespaces_missing, run
from workers.sandboxes.provider import NodeSandboxProvider
from workers.sandboxes.sandbox_user import drop_privileges

_OPTIONS = (
    *("--containall", "--no-home", "--no-mount", "sys,tmp,home,cwd,bind-paths"),
    *("--hostname", "sandbox", "--no-init", "--no-umask"),
    # gives the first process a capability that no other process has, so none can inspect it
    *("--no-privs", "--add-caps", "CAP_WAKE_ALARM"),
)
_NO_NETWORK = ("--net", "--network", "none")


@cache
def _missing(config: SandboxConfig) -> str:
    path = program(config)
    if path is None:
        return f"no apptainer or singularity on PATH: {APPTAINER_REMEDY}"
    try:
        # if only the monitor can open its folder to the sandbox user, it suffices that it runs for this process's user
        drop = [] if exposure(config)[0] else drop_privileges(config.user)
        done = answer_of(lambda: run([*drop, str(path), "--version"]))
    except (OSError, SandboxError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return f"{path} does not run for the sandbox user: {done.stderr.strip()[-300:]}"
    return namespaces_missing(config)


def _runtime(
    config: SandboxConfig, state: Path, binds: dict[str, str], spec: SandboxSpec
) -> tuple[list[str], dict[str, str]]:
    options = [*_OPTIONS, *(() if spec.network else _NO_NETWORK), "--pwd", spec.workdir]
    masks = [word for name in MASKED if Path(name).exists() for word in ("--bind", f"/dev/null:{name}")]
    own_binds = ["--bind", f"{state / SOCKETS}:/run/farm", "--bind", "/proc/sys:/proc/sys:ro"]
    command = exec_command(config, state / "root", binds, [*options, *own_binds, *masks])
    own = str(state / "runtime")
    # Apptainer's own state, which is by default in a home folder that nodes may share
    names = (
        "APPTAINER_CONFIGDIR",
        "APPTAINER_TMPDIR",
        "APPTAINER_CACHEDIR",
        "SINGULARITY_TMPDIR",
        "SINGULARITY_CACHEDIR",
    )
    folders = [str(Path(command[0]).parent), *os.defpath.split(":"), "/usr/sbin", "/sbin"]
    return command, {"HOME": own, "PATH": ":".join(folders), "LANG": "C.UTF-8", **dict.fromkeys(names, own)}


class SingularityProvider(NodeSandboxProvider):
    """See `workers.plugins.interfaces.SandboxProvider`."""

    kind: ClassVar[str] = "singularity"
    priority: ClassVar[int] = 20
    runtime = staticmethod(_runtime)

    def missing(self) -> str:
        return _missing(self.config) or cgroups.missing(self.config)
