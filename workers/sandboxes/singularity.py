"""Sandboxes by Apptainer or Singularity, in the foreground, on an overlay of our own.

Not `instance start`: that takes four times as long and keeps two more processes. Not Apptainer's overlay: without
`userxattr` it cannot delete folders of the image. It is given the merged folder, as writable.
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import ClassVar

from farm.errors import SandboxError
from farm.request import SandboxSpec
from workers.sandboxes import cgroups
from workers.sandboxes.launch import MASKED
from workers.sandboxes.owner import drop_privileges
from workers.sandboxes.probe import answer_of, namespaces_missing, run
from workers.sandboxes.provider import JoinedProvider
from workers.sandboxes.runtime import MEND, exec_command, exposure, program
from workers.sandboxes.start import SOCKETS

_OPTIONS = (
    *("--containall", "--no-home", "--no-mount", "sys,tmp,home,cwd,bind-paths"),
    *("--hostname", "sandbox", "--no-init", "--no-umask", "--no-privs"),
)
_NO_NETWORK = ("--net", "--network", "none")


@cache
def _missing() -> str:
    found = program()
    if found is None:
        return f"no apptainer or singularity on PATH: {MEND}"
    try:
        # where only the monitor can open the way to it, that it runs at all must do
        drop = [] if exposure()[0] else drop_privileges()
        done = answer_of(lambda: run([*drop, str(found), "--version"]))
    except (OSError, SandboxError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return f"{found} does not run for the sandbox user: {done.stderr.strip()[-300:]}"
    return namespaces_missing()


def _runtime(state: Path, binds: dict[str, str], spec: SandboxSpec) -> tuple[list[str], dict[str, str]]:
    options = [*_OPTIONS, *(() if spec.network else _NO_NETWORK), "--pwd", spec.workdir]
    masks = [word for name in MASKED if Path(name).exists() for word in ("--bind", f"/dev/null:{name}")]
    command = exec_command(state / "root", binds, [*options, "--bind", f"{state / SOCKETS}:/run/farm", *masks])
    own = str(state / "runtime")
    # its bookkeeping, by default in a home folder that may be shared by nodes
    names = (
        "APPTAINER_CONFIGDIR",
        "APPTAINER_TMPDIR",
        "APPTAINER_CACHEDIR",
        "SINGULARITY_TMPDIR",
        "SINGULARITY_CACHEDIR",
    )
    folders = [str(Path(command[0]).parent), *os.defpath.split(":"), "/usr/sbin", "/sbin"]
    return command, {"HOME": own, "PATH": ":".join(folders), "LANG": "C.UTF-8", **dict.fromkeys(names, own)}


class SingularityProvider(JoinedProvider):
    """See `workers.interfaces.SandboxProvider`."""

    kind: ClassVar[str] = "singularity"
    runtime = staticmethod(_runtime)

    def missing(self) -> str:
        """See `SandboxProvider.missing`."""
        return _missing() or cgroups.missing()
