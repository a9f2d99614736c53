"""The container runtime of this node, Apptainer or Singularity, and what is asked of it through spython."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from farm.errors import SandboxError
from farm.settings import settings
from workers.sandboxes.content import digest, made_once
from workers.sandboxes.owner import drop_privileges, give, sandbox_user

NAMES = ("apptainer", "singularity")
_WRAPPER = """#!/bin/sh
# its bookkeeping goes here and not to a home folder
export HOME={own} APPTAINER_CONFIGDIR={own} APPTAINER_CACHEDIR={own} APPTAINER_TMPDIR={own}
cd {own} || exit
{reach}
exec {drop} {program} "$@"
"""
_ALONE = """[ -n "$ALONE" ] || ALONE=1 exec unshare --mount -- "$0" "$@" """
_REACH = """mount --rbind {prefix} {own}/prefix && mount -t tmpfs -o mode=755 tmpfs {closed} && mkdir -p {prefix} &&
mount --bind {own}/prefix {prefix} || exit"""
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
    found = program()
    if found is None:
        raise SandboxError(f"no apptainer or singularity on this node: {MEND}")
    # spython calls `singularity`, by that name and on PATH, whatever the runtime is called
    text = _wrapper(found)
    folder = made_once(settings().cache / "runtime" / digest(text), lambda place: _write_wrapper(place, text))
    os.environ["PATH"] = f"{folder}:{os.environ.get('PATH', os.defpath)}"
    from spython.main import Client

    Client.quiet = True
    return Client


def _own_folder() -> Path:
    """Where the runtime works when it does not run a sandbox; the sandbox user's."""
    own = settings().scratch.absolute() / "runtime"
    (own / "prefix").mkdir(parents=True, exist_ok=True)
    user = sandbox_user()
    if user:
        os.chown(own, *user)
    return own


def _wrapper(found: Path) -> str:
    """A script that runs it as the sandbox user, on its way there if need be: root of the host unpacks no images."""
    own, (prefix, closed) = shlex.quote(str(_own_folder())), exposure()
    reach = (
        f"{_ALONE}\n{_REACH}".format(prefix=shlex.quote(prefix), closed=shlex.quote(closed), own=own) if closed else ""
    )
    return _WRAPPER.format(own=own, reach=reach, drop=shlex.join(drop_privileges()), program=shlex.quote(str(found)))


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


def unpack(image: Path, folder: Path) -> None:
    """Turn an image file into a folder, which is there and empty. Raises SandboxError. Blocks for seconds."""
    spython = client()
    with tempfile.TemporaryDirectory(dir=_own_folder(), ignore_cleanup_errors=True) as name:
        place = Path(name)
        source = place / image.name
        # the sandbox user need not be able to reach the original
        shutil.copyfile(image, source) if sandbox_user() else source.symlink_to(image)
        give(place)
        kind = "" if image.suffix == ".sif" else f"{_archive_kind(image)}:"
        try:
            spython.build(recipe=f"{kind}{source}", image=str(place / "root"), sandbox=True, sudo=False, quiet=True)
        # it exits where it should raise, and fails to decode what it should pass on
        except (Exception, SystemExit) as error:
            raise SandboxError(f"image {image} could not be unpacked: {error}") from error
        # it gives back a path whether or not the build worked
        if not (place / "root/usr").is_dir():
            raise SandboxError(f"image {image} could not be unpacked; the runtime's own words are in the worker's log")
        folder.rmdir()
        shutil.move(place / "root", folder)


def _archive_kind(image: Path) -> str:
    with tarfile.open(image) as archive:
        return (
            "oci-archive"
            if "oci-layout" in (name.removeprefix("./") for name in archive.getnames())
            else "docker-archive"
        )
