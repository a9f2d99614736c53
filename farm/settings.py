"""All settings of the farm: the only reader of environment variables (prefix `FARM_`)."""

from __future__ import annotations

import os
import socket
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


def _scratch() -> Path:
    return Path(tempfile.gettempdir()) / f"farm-{os.getuid()}"


class Settings(BaseSettings):
    """Every field may be set as `FARM_<NAME>`; times in seconds."""

    model_config = SettingsConfigDict(env_prefix="FARM_", extra="ignore")

    home: Path = Field(default_factory=lambda: Path.home() / ".farm")
    """Store of an embedded farm, caches of images and environments. May be shared by nodes, except for SQLite."""
    scratch: Path = Field(default_factory=_scratch)
    """Node-local disk for the writable layers of sandboxes; never a network file system."""
    store_url: str = ""
    """A database URL; empty is the embedded farm's SQLite under `home`."""
    broker_url: str = ""
    """A Redis URL, or `amqp://` for RabbitMQ; empty is the embedded farm's own Redis."""
    api_key: str = Field(default="", repr=False)
    """What `farm api` wants of all who ask it, and what clients show it; empty: nothing, on this machine alone."""
    policy_url: str = ""
    """An OpenAI-compatible server the farm starts with, such as `http://127.0.0.1:8000/v1`."""
    policy_key: str = Field(default="none", repr=False)
    """The API key for it."""
    policy_model: str = ""
    """Its model; empty takes the first that it lists."""
    policy_timeout_s: float = 600.0
    """One request to an engine."""

    search: str = ""
    """The engine of the `search` tool: `tavily`, `searxng:URL` or `http:URL`; empty switches it off."""
    search_key: str = Field(default="", repr=False)
    """Its API key, if it needs one; used by the workers, never seen by a sandbox."""
    search_allowed: str = ""
    """Domains with commas between them: if any, search shows pages of these and of what is below them alone."""
    search_blocked: str = ""
    """Domains whose pages it never shows, such as those that hold the answers."""

    node: str = Field(default_factory=socket.gethostname)
    """The name of this node; one supervisor each."""
    pool: str = ""
    """Which pool a worker process serves; the node supervisor sets it."""
    lease_s: float = 60.0
    """How long a claim lives without renewal; renewed every third of it."""
    node_timeout_s: float = 60.0
    """After this long without a heartbeat a node counts as dead."""
    overdue_s: float = Field(default=120.0, gt=0)
    """What a stage gets beyond its limit to end by itself; then it is stopped from outside, as a failed attempt."""
    stall_s: float = Field(default=60.0, gt=0)
    """A worker process whose event loop does not answer for so long hands back what it plays and ends. A stage that
    does not end for so long after it was stopped is waited for no more."""
    tick_s: float = 0.5
    """The dispatcher's period when nothing wakes it."""
    ring_again_s: float = 3.0
    """A stage that is still queued this long after it was rung is rung again; doubles each time, up to a minute."""
    retry_s: float = 2.0
    """Pause before a failed attempt is tried again; doubles each time, up to a minute."""
    max_open: int = Field(default=1_000_000, ge=1)
    """Rollouts of all batches that may be submitted and not have ended: a submit beyond it is refused, for now."""
    audit_s: float = 30.0
    """The leading dispatcher checks the invariants of one open batch each so often, in turn; 0 switches it off."""
    sandbox_user: str = "nobody"
    """Whom sandboxes run as when the farm is started by root."""
    cgroup: Path | None = None
    """A control group in which the farm may make others, one for each sandbox, so that the kernel holds their memory
    limits; without one, the farm measures. Of version 2, a delegated group without processes, such as one below a
    systemd unit with `Delegate=yes`, the farm's own processes beside it; of version 1, one of the memory controller.
    """
    sandbox: str = "auto"
    """The sandbox of instances that leave the choice open: `auto`, `singularity` or `namespace`."""
    stock: int = 8
    """Sandboxes of one sort kept ready for what is queued, so that a start is a hand-over; 0 switches it off."""
    stock_total: int = 32
    """Sandboxes that are kept ready in all."""
    stock_starts: int = 0
    """How many are started for the stock at a time; 0 takes half the cores. Starts that somebody waits for go first."""
    stock_idle_s: float = 60.0
    """A ready sandbox that nothing queued needs is kept for so long; a few of what was used last, for twice as long."""
    layer_idle_s: float = 300.0
    """What was prepared for all samples of an instance is kept for so long after the last of them was started."""
    artefacts_mb: float = 16.0
    """What the artefacts of one rollout, such as long outputs in full, may take up in the store, compressed."""
    image_cache: Literal["scratch", "versioned", "lock"] = "versioned"
    """When an image in the cache is used again. `scratch`: only if this farm built it since it started. `versioned`:
    if it was built of the same content by the same version of the runtime. `lock`: always, whatever its source is now:
    what an image name stood for when it was first used is what it stands for until `farm images build` locks it anew.
    """
    started_at: float | None = None
    """When this farm started, in seconds since 1970; the node's supervisor sets it for its workers."""

    lifeline_fd: int | None = None
    """An inherited read end of a pipe that the node's supervisor holds: its sandboxes end when that is closed."""

    @property
    def database_url(self) -> str:
        return self.store_url or f"sqlite:///{self.home.absolute() / 'farm.db'}"

    @property
    def cache(self) -> Path:
        return self.home.absolute() / "cache"


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process, read once."""
    return Settings()
