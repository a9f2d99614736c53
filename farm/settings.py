"""All settings of the farm: the only reader of environment variables (prefix `FARM_`)."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from farm.errors import InvalidRequest

DATABASE_FILE = "farm.db"
"""The embedded farm's SQLite, in `home`."""


def _scratch() -> Path:
    return Path(tempfile.gettempdir()) / f"farm-{os.getuid()}"


def default_home() -> Path:
    """Return the clone's `.farm`, if this runs in the environment that `make` made there, and else `~/.farm`.

    The commands of its `.venv` so find what `make demo` played, from whatever folder.
    """
    environment = Path(sys.prefix)
    with contextlib.suppress(OSError):
        if (environment / "place").read_text().strip() == str(environment.parent):
            return environment.parent / ".farm"
    return Path.home() / ".farm"


def _node() -> str:
    # several nodes of a Slurm may have one host name, as those of a laptop's do
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


class Settings(BaseSettings):
    """Every field may be set as `FARM_<NAME>`; times in seconds."""

    model_config = SettingsConfigDict(env_prefix="FARM_", extra="ignore")

    home: Path = Field(default_factory=default_home)
    """Store of an embedded farm, caches of images and environments. May be shared by nodes, except for SQLite."""
    scratch: Path = Field(default_factory=_scratch)
    """Node-local disk for the writable layers of sandboxes; never a network file system."""
    store_url: str = ""
    """A database URL; empty is the embedded farm's SQLite under `home`."""
    broker_url: str = ""
    """A Redis URL, or `amqp://` for RabbitMQ; empty is the embedded farm's own Redis."""
    api_key: str = Field(default="", repr=False)
    """The key that `farm api`, Flower and `farm metrics` require, and that clients send; empty takes the one generated
    in `home`."""
    policy_url: str = ""
    """An OpenAI-compatible server the farm starts with, such as `http://127.0.0.1:8000/v1`."""
    policy_key: str = Field(default="none", repr=False)
    """The API key for it."""
    policy_model: str = ""
    """Its model; empty takes the first that it lists."""
    policy_timeout_s: float = 600.0
    """One request to an engine."""
    engine_away_s: float = Field(default=60.0, gt=0)
    """Seconds that a call waits for a batch's or an instance's own engine that is out; then its attempt fails."""

    search: str = ""
    """The engine of the `search` tool: `tavily`, `searxng:URL` or `http:URL`; empty switches it off."""
    search_key: str = Field(default="", repr=False)
    """Its API key, if it needs one; used by the workers, never seen by a sandbox."""
    search_allowed: str = ""
    """Domains with commas between them: if any, search shows pages of these and of what is below them alone."""
    search_blocked: str = ""
    """Domains whose pages it never shows, such as those that hold the answers."""

    node: str = Field(default_factory=_node)
    """The name of this node; one supervisor each. In a step of Slurm it is by default Slurm's name for the node."""
    log: Literal["text", "json"] = "text"
    """The form of the lines that a node and its workers log."""
    pool: str = ""
    """The pool that a worker process serves; the node supervisor sets it."""
    lease_s: float = 60.0
    """Seconds a claim lives without renewal; renewed every third of it."""
    node_timeout_s: float = 60.0
    """Seconds without a heartbeat after which a node counts as dead."""
    overdue_s: float = Field(default=120.0, gt=0)
    """Seconds beyond its limit that a stage gets to end by itself; then it is stopped, as a failed attempt."""
    stall_s: float = Field(default=60.0, gt=0)
    """A worker process whose event loop does not answer for so long hands back what it plays and ends. A stage that
    does not end for so long after it was stopped is abandoned."""
    tick_s: float = 0.5
    """The dispatcher's period when nothing wakes it."""
    ring_again_s: float = Field(default=3.0, gt=0, le=60)
    """Seconds until the message of a stage that is still queued is sent again; doubles each time, up to a minute."""
    retry_s: float = 2.0
    """Pause before a failed attempt is tried again; doubles each time, up to a minute."""
    max_open: int = Field(default=1_000_000, ge=1)
    """Rollouts of all batches that may be submitted and not have ended: a submit beyond it is refused, for now."""
    prorl_timeout_s: float = Field(default=300.0, gt=0, le=86_400)
    """The `--timeout` of ProRL's server, where the API speaks its protocol: seconds that a play may take. A request
    waits for twice that and 10 s more."""
    audit_s: float = 30.0
    """The leading dispatcher checks the invariants of one open batch each so often, in turn; 0 switches it off."""
    sandbox_user: str = "nobody"
    """The user that sandboxes run as when the farm is started by root."""
    sandbox_ids: str = Field(default="", pattern=r"^([1-9]\d{0,9}:\d{1,10})?$")
    """Ids of users and groups of the node, `FIRST:COUNT`, of which each sandbox gets one when the farm is started by
    root; empty takes those that `/etc/subuid` and `/etc/subgid` have for `FARM_SANDBOX_USER`. Without any, sandboxes
    share that user."""
    cgroup: Path | None = None
    """A control group in which the farm may make others, one for each sandbox, so that the kernel holds their memory
    limits; without one, the farm measures. Of version 2, a delegated group without processes, such as one below a
    systemd unit with `Delegate=yes`, the farm's own processes beside it; of version 1, one of the memory controller.
    """
    sandbox: str = "auto"
    """The sandbox of instances that leave the choice open: `auto`, `singularity` or `namespace`."""
    stock: int = 8
    """Sandboxes of one sort that the warm pool keeps for queued rollouts; 0 switches it off."""
    stock_total: int = 32
    """Sandboxes of the warm pool in all."""
    stock_starts: int = 0
    """Most starts for the warm pool at a time; 0 takes half the cores. Starts that a rollout waits for go first."""
    stock_idle_s: float = 60.0
    """Seconds that the warm pool keeps a sandbox that nothing queued needs; a few, used last, twice as long."""
    layer_idle_s: float = 300.0
    """Seconds that the prepared layer of an instance is kept after the last of its samples was started."""
    artefacts_mb: float = 16.0
    """The most megabytes, compressed, that one rollout's artefacts, such as long outputs in full, take in the store."""
    layer_mb: float = Field(default=64.0, ge=0, le=1000)
    """The most megabytes, packed, of the files that a policy left in its sandbox to be kept in the store where a
    handler needs them, so that scoring can be repeated. What is more is scored once, on the node that played it."""
    image_cache: Literal["scratch", "versioned", "lock"] = "versioned"
    """The rule by which a cached image is reused. `scratch`: only if this farm built it since it started. `versioned`:
    if it was built of the same content by the same version of the runtime. `lock`: always, whatever its source is now:
    an image name keeps its first meaning until `farm images build` locks it anew.
    """
    image_builder: Literal["own", "buildah"] = "own"
    """The program that builds Dockerfiles: the farm's own, or `buildah` where it is installed."""
    build_network: bool = False
    """True to let builds of Dockerfiles use the node's network, whatever their tasks may; see `farm images build`."""
    build_env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of builds alone, as JSON, such as mirrors: `{"PIP_INDEX_URL": "https://..."}`."""
    build_files: dict[str, str] = Field(default_factory=dict)
    """Files or folders of the node that builds see, read-only, as JSON from their path inside: `{"/etc/pip.conf":
    "/srv/mirrors/pip.conf"}`."""
    swe_images: dict[str, str] = Field(default_factory=dict)
    """JSON: for each data set of SWE rows the template of its images' names on this node, such as
    `{"swe-bench": "/images/{id_1776}.sif"}`; data sets without one take what their rows name."""
    started_at: float | None = None
    """The time at which this farm started, in seconds since 1970; the node supervisor sets it for its workers."""

    lifeline_fd: int | None = None
    """An inherited read end of a pipe that the node's supervisor holds: its sandboxes end when that is closed."""

    @property
    def database_url(self) -> str:
        return self.store_url or f"sqlite:///{self.home.absolute() / DATABASE_FILE}"

    @property
    def cache(self) -> Path:
        return self.home.absolute() / "cache"


@lru_cache(maxsize=1)
def settings() -> Settings:
    """Return the settings of this process, read once. Raises InvalidRequest naming the variables that are wrong."""
    try:
        return Settings()
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)
        raise InvalidRequest.of([(f"FARM_{str(each['loc'][0]).upper()}", each["msg"]) for each in wrong]) from None
