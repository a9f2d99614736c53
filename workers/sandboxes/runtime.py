"""The container runtime of this node, Apptainer or Singularity, and what is asked of it through spython."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from farm.errors import SandboxError
from farm.settings import settings
from workers.sandboxes.owner import sandbox_user

NAMES = ("apptainer", "singularity")
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
    if shutil.which("singularity") is None:
        links = settings().cache / "runtime"
        links.mkdir(parents=True, exist_ok=True)
        link = links / "singularity"
        if not (link.is_symlink() and link.readlink() == found):
            temporary = Path(tempfile.mkdtemp(dir=links)) / "singularity"
            temporary.symlink_to(found)
            temporary.rename(link)
            temporary.parent.rmdir()
        os.environ["PATH"] = f"{links}:{found.parent}:{os.environ.get('PATH', os.defpath)}"
    from spython.main import Client

    Client.quiet = True
    return Client


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
    """Turn an image file into a folder. Raises SandboxError. Blocks for seconds."""
    source = str(image) if image.suffix == ".sif" else f"{_archive_kind(image)}:{image}"
    folder.rmdir()
    spython = client()
    try:
        spython.build(recipe=source, image=str(folder), sandbox=True, sudo=False, quiet=True)
    # it exits where it should raise, and fails to decode what it should pass on
    except (Exception, SystemExit) as error:
        raise SandboxError(f"image {image} could not be unpacked: {error}") from error
    # it gives back a path whether or not the build worked
    if not (folder / "usr").is_dir():
        raise SandboxError(f"image {image} could not be unpacked; the runtime's own words are in the worker's log")


def _archive_kind(image: Path) -> str:
    import tarfile

    with tarfile.open(image) as archive:
        return (
            "oci-archive"
            if "oci-layout" in (name.removeprefix("./") for name in archive.getnames())
            else "docker-archive"
        )
