"""A handler's requirements for a sandbox: image, packages, limits, network."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from farm.records.request_values import Count, Request


class Archive(Request):
    """A source archive of the package index, unpacked in the sandbox. Identified by its digest, not by its address."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+!_-]*$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    path: str = "/workspace"
    """The folder in the sandbox that gets the contents of the archive's top folder."""


class SandboxLimits(Request):
    """Resource limits of a sandbox. Exceeding one ends a command, with a note for the model; the sandbox continues.

    Memory, processes and disk are for the whole sandbox; CPU time, open files and file size for each process.
    """

    memory_mb: Count = 4096
    n_processes: Count = 512
    disk_mb: Count = 8192
    """Data written on top of its image; also limits the number of files and folders: one per 16 KB, at least 16,384."""
    cpu_s: Count = 3600
    n_files: Count = 1024
    file_mb: Count = 4096


Requirement = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._\[\],-]*==[A-Za-z0-9.+!_-]+$")]
"""An exact requirement of a Python environment, `name==version`."""

AgentPackage = Annotated[
    str,
    Field(
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._\[\],-]*==[A-Za-z0-9.+!_-]+|/[^#\s]*[^#/\s]+\.whl(#sha256=[0-9a-f]{64})?)$"
    ),
]
"""An exact requirement, or the absolute path of a wheel on every node, optionally with `#sha256=…` to check it."""


class AgentProgram(Request):
    """A program of an agent, mounted read-only at `/opt/farm/NAME` in its sandbox. Each node builds it once.

    `npm`: the packages of a `package-lock.json`, which has the digest of each; their scripts are not run. `folder`: a
    folder of the node, as it is when the sandbox starts. `archive`: a tar or a zip, a path or a URL. `image`: any
    `SandboxSpec.image` except `host` and images built of layers.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    kind: Literal["npm", "folder", "archive", "image"]
    source: Annotated[str, Field(min_length=1)]
    """The absolute path of the lock file, folder or archive; the name of an image."""
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{24}|[0-9a-f]{64})?$")] = ""
    """The required digest of its content: the sha256 of a lock file or an archive; for a folder or an image a digest of
    the farm's own, which the error for a mismatch shows. Empty: not checked; not allowed for URLs."""

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        if self.name == "agent":
            raise ValueError("/opt/farm/agent is reserved for the agent's Python packages: use another name")
        is_address = self.kind == "archive" and self.source.startswith(("https://", "http://"))
        if is_address and len(self.digest) != 64:
            raise ValueError(f"{self.source} needs the sha256 of its content as digest")
        is_tag = self.kind == "image" and "://" in self.source and "@sha256:" not in self.source
        if is_tag and not self.digest:
            raise ValueError(f"{self.source} may change: name it by @sha256:, or give its digest")
        if self.kind != "image" and not is_address and not self.source.startswith("/"):
            raise ValueError(f"{self.source!r} must be an absolute path, which every node has")
        return self


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
    """Values for the template of a `.def.j2` image, or build arguments of a Dockerfile."""
    fallback_image: Annotated[str, Field(pattern=r"^(dockerfile:.+)?$")] = ""
    """A build context, `dockerfile:FOLDER`, to build the image from if `image` is in a registry and cannot be
    pulled. The node's log and the image's notes say so; it is used while it stays in the cache."""
    archives: tuple[Archive, ...] = ()
    packages: tuple[Requirement, ...] = ()
    agent_packages: tuple[AgentPackage, ...] = ()
    """Requirements of an agent that runs inside: a separate environment in `/opt/farm/agent`, not on PATH."""
    agent_python: Annotated[str, Field(pattern=r"^(3\.[0-9]{1,2})?$")] = ""
    """The oldest Python, such as `3.12`, that supports those packages; empty: the farm's own."""
    agent_programs: tuple[AgentProgram, ...] = ()
    """Further programs of the agent, each in `/opt/farm/NAME`."""
    without_dependencies: bool = False
    """Install only `packages`, without their dependencies, e.g. if these conflict or are never used."""
    workdir: str = "/workspace"
    """The working directory of commands; empty: the image's WORKDIR, or `/workspace` if it has none."""
    env: dict[str, str] = Field(default_factory=dict)
    limits: SandboxLimits = SandboxLimits()
    network: bool = False
    """True: shares the node's network with everything reachable from there. False: it only has its own `lo`."""
    network_in: tuple[Literal["init", "run", "eval"], ...] = ()
    """Phases in which its commands have the node's network although `network` is false: preparation, the run, scoring
    in a fresh sandbox."""
    user: Annotated[
        str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,31}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,31})?)?$")
    ] = ""
    """The user of commands, by name in the image's /etc/passwd or by number; empty: the image's USER, else root. It has
    the user's name, number and home, but rights to all files, as a sandbox has one owner."""
    cpus: Annotated[float, Field(gt=0, le=4096)] | None = None
    """Processors for its processes, rounded up to whole ones; None: all of the node's."""
    image_first: bool = False
    """The image's own programs precede those of the farm's Python environment on PATH."""
    fake_root: bool | None = None
    """True: emulate several users, as installers need: programs can become other users and change owners, which all
    programs see, although the kernel knows one user inside. False: only the kernel's one user. None: True for every
    image but `host`, where owners are shown only to programs started after one was set."""
