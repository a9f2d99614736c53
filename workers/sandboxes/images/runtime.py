"""The container runtime of this node, Apptainer or Singularity, and the commands for it, from spython."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from farm.errors import SandboxError
from workers.config import SandboxConfig
from workers.sandboxes.images.content_store import digest, made_once
from workers.sandboxes.isolation.fork_requests import program_of
from workers.sandboxes.sandbox_user import sandbox_user

NAMES = ("apptainer", "singularity")
_PROJECT = str(Path(__file__).parents[3])
_CONFINED = program_of("workers.sandboxes.images.building.confined_process")
VERSION_S = 60.0
APPTAINER_REMEDY = "install Apptainer (workers/sandboxes/apptainer.sh PREFIX needs no root) and put it on PATH"


@cache
def program(config: SandboxConfig) -> Path | None:
    """Return the runtime's command on PATH or in the folder `apptainer` of the farm's home; None if there is none."""
    own = config.home / "apptainer/usr/bin"
    for name in NAMES:
        if path := shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{own}"):
            return Path(path).absolute()
    return None


def exposure(config: SandboxConfig) -> tuple[str, str]:
    """Return the runtime's folder and the uppermost of its parents that is closed to the sandbox user.

    Both are empty if no parent is closed. Checked each time, because any command of the farm may close FARM_HOME to
    others, even while this process runs.
    """
    path = program(config)
    if path is None or sandbox_user(config.user) is None:
        return "", ""
    closed = [parent for parent in path.parents if not parent.stat().st_mode & stat.S_IXOTH]
    prefix = path.parents[2] if path.parents[1].name == "usr" else path.parents[1]
    return (str(prefix), str(closed[-1])) if closed else ("", "")


@cache
def client(config: SandboxConfig) -> Any:
    """Return spython's client, set up to find this node's runtime. Raises SandboxError if there is none."""
    # spython calls `singularity`, by that name and on PATH, whatever the runtime's name is
    os.environ["PATH"] = f"{wrapper(config).parent}:{os.environ.get('PATH', os.defpath)}"
    from spython.main import Client

    Client.quiet = True
    return Client


@cache
def version(config: SandboxConfig) -> str:
    """Return the runtime's version string. Raises SandboxError if there is no runtime or it does not run."""
    try:
        done = subprocess.run([wrapper(config), "--version"], capture_output=True, text=True, timeout=VERSION_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{program(config)} does not run: {error}") from error
    if done.returncode:
        raise SandboxError(f"{program(config)} does not run for the sandbox user: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()


def wrapper(config: SandboxConfig, tool: str = "") -> Path:
    """Return a command that runs the runtime as the sandbox user. Raises SandboxError.

    Its folder is WORK_FOLDER, or `own_folder()`. With `tool`, it runs that program, which is next to the runtime or on
    the node's PATH.
    """
    path = program(config)
    if path is None:
        raise SandboxError(f"no apptainer or singularity on this node: {APPTAINER_REMEDY}")
    if tool:
        own_folders = [folder for folder in (path.parent, path.parents[1] / "libexec/apptainer/bin") if folder.is_dir()]
        own = shutil.which(tool, path=f"{os.environ.get('PATH', os.defpath)}:{':'.join(map(str, own_folders))}")
        if own is None:
            raise SandboxError(f"no {tool} on this node: install squashfs-tools")
        path = Path(own)
    text = _wrapper(config, path)
    folder = made_once(config.cache / "runtime" / digest(text), lambda temporary: _write_wrapper(temporary, text))
    return folder / "singularity"


def own_folder(config: SandboxConfig) -> Path:
    """Return the sandbox user's folder in which the runtime works when it does not run a sandbox."""
    own = config.scratch / "runtime"
    own.mkdir(parents=True, exist_ok=True)
    user = sandbox_user(config.user)
    if user:
        os.chown(own, *user)
    return own


def _wrapper(config: SandboxConfig, runtime: Path) -> str:
    """Return a script that runs it as the sandbox user, after opening the closed folder to that user if necessary.

    The host's root must not unpack images.
    """
    own, exposed = shlex.quote(str(own_folder(config))), shlex.join(exposure(config))
    confined = shlex.join([sys.executable, "-I", "-S", "-c", _CONFINED, _PROJECT])
    user = shlex.join(map(str, sandbox_user(config.user) or ("", "")))
    text = Path(__file__).with_name("runtime_wrapper.sh").read_text()
    values = {"OWN": own, "EXPOSURE": exposed, "CONFINED": confined, "USER": user, "PROGRAM": shlex.quote(str(runtime))}
    return re.sub("@([A-Z]+)@", lambda field: values[field[1]], text)


def _write_wrapper(folder: Path, text: str) -> None:
    (folder / "singularity").write_text(text)
    (folder / "singularity").chmod(0o755)


def exec_command(config: SandboxConfig, root: Path, binds: Mapping[str, str], options: Sequence[str]) -> list[str]:
    """Return the command line that runs a program in a root file system; append the program.

    `binds` maps existing sources to targets, all read-only.
    """
    spython = client(config)
    words = spython._init_command("exec", ["-s"])
    words += spython._generate_bind_list([f"{source}:{target}:ro" for source, target in binds.items()])
    words += ["--writable", *options, str(root)]
    return [str(program(config)), *(word for word in words[1:] if word != "--quiet")]
