"""The requirements of a handler for a sandbox: its image, packages, limits, network."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from farm.records.request_values import Count, Request


class Archive(Request):
    """A source archive of the package index, unpacked in the sandbox. Known by its digest, not by its address."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+!_-]*$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    path: str = "/workspace"
    """The folder in the sandbox that gets the contents of its top folder."""


class SandboxLimits(Request):
    """Resource limits of a sandbox. Reaching one ends a command, with a note for the model; the sandbox goes on.

    Memory, processes and disk are of the whole sandbox; CPU time, open files and file size of each process in it.
    """

    memory_mb: Count = 4096
    n_processes: Count = 512
    disk_mb: Count = 8192
    """Data it writes over its image; for each 16 KB there can be a file or folder, 16,384 in all at least."""
    cpu_s: Count = 3600
    n_files: Count = 1024
    file_mb: Count = 4096


Requirement = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._\[\],-]*==[A-Za-z0-9.+!_-]+$")]
"""An exact requirement of a Python environment, `name==version`."""


class SandboxSpec(Request):
    """A handler's requirements for a sandbox.

    `image` is one of: `host` (the node's own system folders, read-only); a folder with a root file system; a `.sif`;
    `docker-archive:FILE`, `oci-archive:FILE` or another `.tar` of the two; `docker://NAME`, which needs the network
    when it is built; a definition file `FILE.def`, or `FILE.def.j2` rendered with `image_values`; `dockerfile:FOLDER`,
    a build context, with `image_values` as build arguments; a name of `farm images alias`; or `cached:KEY`, an image
    that was built before.
    `packages` are exact requirements (`name==version`) of a Python environment that is first on PATH.
    """

    kind: str = "auto"
    image: str = "host"
    image_values: dict[str, str] = Field(default_factory=dict)
    """Values that the template of a `.def.j2` image is rendered with, or build arguments of a Dockerfile."""
    archives: tuple[Archive, ...] = ()
    packages: tuple[Requirement, ...] = ()
    agent_packages: tuple[Requirement, ...] = ()
    """Requirements of an agent that runs inside: a separate environment in `/opt/farm/agent`, not on PATH."""
    without_dependencies: bool = False
    """True to install `packages` alone, as they are listed, where what they declare clashes or is never used."""
    workdir: str = "/workspace"
    """The folder that commands begin in; empty takes the image's WORKDIR, or `/workspace` if it has none."""
    env: dict[str, str] = Field(default_factory=dict)
    limits: SandboxLimits = SandboxLimits()
    network: bool = False
    """True to share the node's network, with all that can be reached from there; else it has only its own `lo`."""
    network_in: tuple[Literal["init", "run", "eval"], ...] = ()
    """Phases in which its commands have the node's network, where `network` is false: while it is prepared, while it is
    played in, while a fresh one is scored in."""
    user: Annotated[
        str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,31}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,31})?)?$")
    ] = ""
    """The user that commands run as, by a name of the image's /etc/passwd or a number; empty is root. It has the name,
    number and home that programs ask for, and the rights to all files, as a sandbox has one owner."""
    cpus: Annotated[float, Field(gt=0, le=4096)] | None = None
    """Processors that its processes may use, rounded up to whole ones; None: all of the node's."""
    image_first: bool = False
    """True to find the image's own programs on PATH before those of the farm's Python environment."""
    fake_root: bool = False
    """True to let changes of owner and user, which a rootless sandbox cannot make, seem to succeed, as installers
    need."""
