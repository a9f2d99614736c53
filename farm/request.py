"""What a trainer asks for: instances, how to sample, and the limits of a rollout. Plain values, checked at the edge."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]
Count = Annotated[int, Field(ge=1)]


class Request(BaseModel):
    """Common settings of all request types: unknown fields are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Instance(Request):
    """One problem. `fields` are the handler's own; it checks them when the batch is submitted."""

    data_source: Annotated[str, Field(min_length=1, max_length=64)]
    fields: dict[str, Any]
    instance_id: Annotated[str, Field(max_length=200)] = ""


class SamplingParams(Request):
    """How the policy samples. None leaves a value to the engine.

    `seed` makes the samples of a group differ reproducibly: sample k is sent `seed + k`.
    """

    temperature: Annotated[float, Field(ge=0, le=10)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    max_tokens: Count | None = None
    stop: tuple[str, ...] = ()
    seed: Annotated[int, Field(ge=0)] | None = None


class Limits(Request):
    """What one attempt may use. A limit the policy reaches is an outcome; its score counts.

    The clocks run while the stage works; waiting in a queue costs nothing.
    """

    max_turns: Count = 32
    max_tokens: Count = 32_768
    """Sampled tokens over all turns."""
    init_s: Seconds = 300.0
    run_s: Seconds = 900.0
    eval_s: Seconds = 600.0
    tool_s: Seconds = 60.0
    """One tool call; its partial output goes to the model."""
    max_observation_chars: Count = 16_000
    """What a tool call may return to the model; the middle is cut out."""


class Archive(Request):
    """A source archive of the package index, unpacked in the sandbox. Known by its digest, not by its address."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+!_-]*$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    path: str = "/workspace"
    """Where its top folder's contents lie in the sandbox."""


class SandboxLimits(Request):
    """What a sandbox may use. Reaching a limit ends a command, with a note for the model; the sandbox goes on.

    Memory, processes and disk are of the whole sandbox; CPU time, open files and file size of each process in it.
    """

    memory_mb: Count = 4096
    n_processes: Count = 512
    disk_mb: Count = 8192
    """What it writes over its image."""
    cpu_s: Count = 3600
    n_files: Count = 1024
    file_mb: Count = 4096


class SandboxSpec(Request):
    """What a handler needs of a sandbox.

    `image` is one of: `host` (the node's own system folders, read-only); a folder with a root file system; a `.sif`;
    `docker-archive:FILE`, `oci-archive:FILE` or another `.tar` of the two; `docker://NAME`, which needs the network
    when it is built; a definition file `FILE.def`, or `FILE.def.j2` rendered with `image_values`.
    `packages` are exact requirements (`name==version`) of a Python environment that is first on PATH.
    """

    kind: str = "auto"
    image: str = "host"
    image_values: dict[str, str] = Field(default_factory=dict)
    """What the template of a `.def.j2` image is rendered with."""
    archives: tuple[Archive, ...] = ()
    packages: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._\[\],-]+==[A-Za-z0-9.+!_-]+$")], ...] = ()
    workdir: str = "/workspace"
    env: dict[str, str] = Field(default_factory=dict)
    limits: SandboxLimits = SandboxLimits()
    network: bool = False
    """Whether it shares the node's network, with all that can be reached from there; off, it has only its own `lo`."""
    fake_root: bool = False
    """Whether changes of owner, which a rootless sandbox cannot make, seem to succeed, as installers want it."""


class BatchRequest(Request):
    """One submit: every instance is played `n_samples` times.

    The same `idempotency_key` names the same batch however often it is submitted.
    `model` picks among the farm's engines; empty takes any.
    """

    instances: Annotated[tuple[Instance, ...], Field(min_length=1, max_length=100_000)]
    n_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    sampling: SamplingParams = SamplingParams()
    limits: Limits = Limits()
    model: str = ""
    sandbox: str = "auto"
    """Which sandbox plays it: `auto`, `singularity` or `namespace`."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    idempotency_key: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
