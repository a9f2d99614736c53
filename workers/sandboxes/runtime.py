"""The container runtime of this node, Apptainer or Singularity, and the commands for it, from spython."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from farm.errors import SandboxError
from farm.settings import settings
from workers.sandboxes.content import digest, made_once
from workers.sandboxes.owner import drop_privileges, sandbox_user

NAMES = ("apptainer", "singularity")
_WRAPPER = """#!/bin/sh
# its bookkeeping goes here and not to a home folder
place=${{PLACE:-{own}}}
export HOME="$place" APPTAINER_CONFIGDIR="$place" APPTAINER_TMPDIR="$place" APPTAINER_CACHEDIR={own}
export SINGULARITY_TMPDIR="$place" SINGULARITY_CACHEDIR={own}
umask 022
cd "$place" || exit
{reach}
exec {drop} --pdeathsig KILL {apart} {program} "$@"
"""
# a build ends with the process that asked for it, and takes along whatever it started, wherever that went
_APART = "unshare --user --map-current-user --pid --fork --kill-child --mount-proc --"
_ALONE = """[ -n "$ALONE" ] || ALONE=1 exec unshare --mount -- "$0" "$@" """
_REACH = """mount --rbind {prefix} {own}/prefix && mount -t tmpfs -o mode=755 tmpfs {closed} && mkdir -p {prefix} &&
mount --bind {own}/prefix {prefix} || exit"""
VERSION_S = 60.0
MEND = "install Apptainer (workers/sandboxes/apptainer.sh PREFIX needs no root) and put it on PATH"


@cache
def program() -> Path | None:
    """The runtime's command on this node, if it has one: on PATH, or in the folder `apptainer` of the farm's home."""
    own = settings().home.absolute() / "apptainer/usr/bin"
    for name in NAMES:
        if found := shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{own}"):
            return Path(found).absolute()
    return None


@cache
def exposure() -> tuple[str, str]:
    """The runtime's own folder, and the uppermost folder on the way to it that is closed to the sandbox user.

    Both are empty if the way is open, as it is but for root's home.
    """
    found = program()
    if found is None or sandbox_user() is None:
        return "", ""
    closed = [parent for parent in found.parents if not parent.stat().st_mode & stat.S_IXOTH]
    prefix = found.parents[2] if found.parents[1].name == "usr" else found.parents[1]
    return (str(prefix), str(closed[-1])) if closed else ("", "")


@cache
def client() -> Any:
    """spython's client, set up to find this node's runtime. Raises SandboxError if there is none."""
    # spython calls `singularity`, by that name and on PATH, whatever the runtime is called
    os.environ["PATH"] = f"{wrapper().parent}:{os.environ.get('PATH', os.defpath)}"
    from spython.main import Client

    Client.quiet = True
    return Client


@cache
def version() -> str:
    """What the runtime says it is. Raises SandboxError if there is none, or it does not run."""
    try:
        done = subprocess.run([wrapper(), "--version"], capture_output=True, text=True, timeout=VERSION_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{program()} does not run: {error}") from error
    if done.returncode:
        raise SandboxError(f"{program()} does not run for the sandbox user: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()


def wrapper() -> Path:
    """A command that runs the runtime as the sandbox user, in the folder PLACE, or in `own_folder()`. SandboxError."""
    found = program()
    if found is None:
        raise SandboxError(f"no apptainer or singularity on this node: {MEND}")
    text = _wrapper(found)
    folder = made_once(settings().cache / "runtime" / digest(text), lambda place: _write_wrapper(place, text))
    return folder / "singularity"


def own_folder() -> Path:
    """Where the runtime works when it does not run a sandbox; the sandbox user's."""
    own = settings().scratch.absolute() / "runtime"
    (own / "prefix").mkdir(parents=True, exist_ok=True)
    user = sandbox_user()
    if user:
        os.chown(own, *user)
    return own


def _wrapper(found: Path) -> str:
    """A script that runs it as the sandbox user, on its way there if need be: root of the host unpacks no images."""
    own, (prefix, closed) = shlex.quote(str(own_folder())), exposure()
    reach = (
        f"{_ALONE}\n{_REACH}".format(prefix=shlex.quote(prefix), closed=shlex.quote(closed), own=own) if closed else ""
    )
    drop = shlex.join(drop_privileges())
    return _WRAPPER.format(own=own, reach=reach, drop=drop, apart=_APART, program=shlex.quote(str(found)))


def _write_wrapper(folder: Path, text: str) -> None:
    (folder / "singularity").write_text(text)
    (folder / "singularity").chmod(0o755)


def exec_command(root: Path, binds: Mapping[str, str], options: Sequence[str]) -> list[str]:
    """The command line that runs something in a root file system; the program to run is to be added.

    `binds` maps sources, which must exist, to targets, all read-only.
    """
    spython = client()
    words = spython._init_command("exec", ["-s"])
    words += spython._generate_bind_list([f"{source}:{target}:ro" for source, target in binds.items()])
    words += ["--writable", *options, str(root)]
    return [str(program()), *(word for word in words[1:] if word != "--quiet")]
