"""The requirements of a handler for a sandbox: its image, packages, limits, network."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

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

AgentPackage = Annotated[
    str,
    Field(
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._\[\],-]*==[A-Za-z0-9.+!_-]+|/[^#\s]*[^#/\s]+\.whl(#sha256=[0-9a-f]{64})?)$"
    ),
]
"""An exact requirement, or the absolute path of a wheel on every node, with `#sha256=…` after it if it is checked."""


class AgentProgram(Request):
    """A program that an agent brings into its sandbox, read-only at `/opt/farm/NAME`. Each node makes it once.

    `npm`: the packages of a `package-lock.json`, which has the digest of each; none of their scripts is run.
    `folder`: a folder of the node, as it is when the sandbox starts. `archive`: a tar or a zip, a path or an address.
    `image`: whatever a `SandboxSpec.image` names, but `host` and what is built of layers.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    kind: Literal["npm", "folder", "archive", "image"]
    source: Annotated[str, Field(min_length=1)]
    """The absolute path of the lock file, folder or archive; the name of an image."""
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{24}|[0-9a-f]{64})?$")] = ""
    """The digest that its content must have: the sha256 of a lock file or an archive; of a folder or an image one of
    the farm's own, which the error for a wrong one tells. Empty for whatever is there, which an address cannot be."""

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        if self.name == "agent":
            raise ValueError("/opt/farm/agent is the environment of its Python packages: give it another name")
        is_address = self.kind == "archive" and self.source.startswith(("https://", "http://"))
        if is_address and len(self.digest) != 64:
            raise ValueError(f"{self.source} needs the sha256 of what it leads to as its digest")
        is_tag = self.kind == "image" and "://" in self.source and "@sha256:" not in self.source
        if is_tag and not self.digest:
            raise ValueError(f"{self.source} may be another image tomorrow: name it by @sha256:, or give its digest")
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
    """Values that the template of a `.def.j2` image is rendered with, or build arguments of a Dockerfile."""
    fallback_image: Annotated[str, Field(pattern=r"^(dockerfile:.+)?$")] = ""
    """A build context, `dockerfile:FOLDER`, of which the image is built where `image` is of a registry and cannot be
    pulled. The node's log and the notes of the image say so; it is used as long as it stays in the cache."""
    archives: tuple[Archive, ...] = ()
    packages: tuple[Requirement, ...] = ()
    agent_packages: tuple[AgentPackage, ...] = ()
    """Requirements of an agent that runs inside: a separate environment in `/opt/farm/agent`, not on PATH."""
    agent_python: Annotated[str, Field(pattern=r"^(3\.[0-9]{1,2})?$")] = ""
    """The oldest Python, such as `3.12`, that those packages can be used by; empty for the farm's own."""
    agent_programs: tuple[AgentProgram, ...] = ()
    """More that the agent brings along, each in `/opt/farm/NAME`."""
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
    fake_root: bool | None = None
    """True for a sandbox with users, though the kernel knows one in there: programs become others, files are given to
    them, and all programs see it, as installers need. None for that in each image but `host`, where owners are shown
    only to programs that are begun when one has been set. False where the image sets none for the kernel's one user."""
