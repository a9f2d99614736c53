"""All settings of the farm: read from FARM_* variables, else from farm.toml (`farm.configuration.config_file`)."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from farm.configuration import config_file
from farm.configuration.config_file import ConfigFile
from farm.configuration.config_file import default_home as default_home
from farm.configuration.secret_values import secret_settings
from farm.configuration.service_urls import sqlite_url, url_fault
from farm.errors import InvalidRequest

DATABASE_FILE = "farm.db"
"""The embedded farm's SQLite, in `home`."""
PREFIX = "FARM_"
SET_BY_FARM = ("pool", "started_at", "lifeline_fd")
"""The settings that the farm's own processes give each other; they cannot stand in a file."""
_PATHS = ("api_ca",)
"""Settings that are paths, but for those whose type says so."""
_PATHS_BY_KEY: dict[str, Callable[[str], bool]] = {
    "build_files": bool,
    # most are names in a registry
    "swe_images": lambda text: text.startswith(("./", "../", "~/")),
}
"""Settings with paths as values, and which of these are paths."""
_URLS = ("store_url", "broker_url", "policy_url", "search", "webhook_url", "otel_endpoint")
_SQLITE = re.compile(r"^(sqlite(?:\+\w+)?:///)(?!/|:memory:|$|\?)")


def _scratch() -> Path:
    return Path(tempfile.gettempdir()) / f"farm-{os.getuid()}"


def _node() -> str:
    # several nodes of a Slurm may have one host name, as those of a laptop's do
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


class _FileSource(InitSettingsSource):
    """The values of farm.toml, but for what variables or the caller say already; paths are relative to its folder."""

    def __call__(self) -> dict[str, Any]:
        path = config_file.path_in_use()
        if path is None:
            return {}
        file = ConfigFile(path)
        for name in SET_BY_FARM:
            if name in file.values:
                raise InvalidRequest(f"{name} is set by the farm itself: leave it out", field=file.place_of(name))
        names = self.settings_cls.model_fields
        result = {}
        for key, value in file.values.items():
            if key in self.current_state or key in config_file.OWN_TABLES:
                continue
            try:
                # an unknown one is refused as such
                result[key] = _in_file(key, _kinds(names[key]) if key in names else set(), value, path.parent)
            except ValueError as error:
                raise InvalidRequest(f"{key}: {error}", field=file.place_of(key)) from None
        return result


def _kinds(field: FieldInfo) -> set[Any]:
    return {field.annotation, *get_args(field.annotation)}


def _in_file(name: str, kinds: set[Any], value: Any, folder: Path) -> Any:
    """Return a setting's value as it is meant where it stands in a file of that folder. Raises ValueError."""
    if isinstance(value, dict) and name in _PATHS_BY_KEY:
        inner = {key: each for key, each in value.items() if isinstance(each, str) and _PATHS_BY_KEY[name](each)}
        return value | {key: config_file.from_file(each, folder) for key, each in inner.items()}
    if isinstance(value, bool) and kinds & {int, float}:
        # which Python takes for 0 and 1
        return str(value).lower()
    if not isinstance(value, str) or not value:
        return value
    if Path in kinds or name in _PATHS:
        return config_file.from_file(value, folder)
    if name == "store_url":
        return _SQLITE.sub(lambda start: start.group(1) + sqlite_url(folder).removeprefix("sqlite:///") + "/", value)
    return value


class Settings(BaseSettings):
    """Every field may be set as `FARM_<NAME>`, or by its name in farm.toml; times in seconds."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", allow_inf_nan=False)

    home: Path = Field(default_factory=default_home)
    """Store of an embedded farm, caches of images and environments. May be shared by nodes, except for SQLite."""
    scratch: Path = Field(default_factory=_scratch)
    """Node-local disk for the writable layers of sandboxes; never a network file system."""
    store_url: str = ""
    """A database URL, for clients also the `http://HOST:8600` of an API; empty is the embedded farm's SQLite under
    `home`."""
    broker_url: str = ""
    """A Redis URL, or `amqp://` for RabbitMQ; empty is the embedded farm's own Redis."""
    api_key: str = Field(default="", repr=False)
    """The key that `farm api`, Flower and `farm metrics` require, and that clients send; empty takes the one generated
    in `home`."""
    api_ca: str = ""
    """A PEM file of the authorities that an API's certificate may be of, for clients; empty takes the usual ones."""
    secret_key: str = Field(default="", repr=False)
    """The key that keys of engines and secrets of batches are encrypted with in the store, the same on all nodes; empty
    takes the one generated in `home`."""
    policy_url: str = ""
    """An OpenAI-compatible server the farm starts with, such as `http://127.0.0.1:8000/v1`."""
    policy_key: str = Field(default="none", repr=False)
    """The API key for it."""
    policy_model: str = ""
    """Its model; empty takes the first that it lists."""
    policy_timeout_s: float = Field(default=600.0, gt=0)
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

    webhook_url: str = Field(
        default="",
        pattern=r"^(https?://[A-Za-z0-9._:\[\]-]+([/?][^\s\x00-\x1f\x7f]*)?)?$",
        max_length=2000,
        repr=False,
    )
    """An address that is told of each batch's end and of each alarm, by a signed POST; empty: none."""
    webhook_hosts: str = ""
    """Hosts with commas between them, such as `hooks.lab.org` or `10.0.0.7:8080`, that keys without the scope `admin`
    may name as webhooks of their batches; empty: none. They are called by the node that dispatches, inside its network.
    """
    webhook_secret: str = Field(default="", repr=False)
    """The key that webhooks are signed with, by HMAC, the same on all nodes and known to receivers. Without one
    `webhook_url` is told nothing, and what batches name is told unsigned."""
    otel_endpoint: str = Field(default="", pattern=r"^(https?://\S+)?$")
    """The address of an OpenTelemetry collector, such as `http://127.0.0.1:4318`, that gets a trace of each rollout by
    OTLP over HTTP; empty sends none. Wants the packages of `rollout-farm[otel]`."""
    node: str = Field(default_factory=_node)
    """The name of this node; one supervisor each. In a step of Slurm it is by default Slurm's name for the node."""
    init_slots: int = Field(default=4, ge=1)
    """Sandboxes that a node starts at a time; `farm node --init`."""
    run_slots: int = Field(default=64, ge=1)
    """Agents that play at a time on a node; `farm node --run`."""
    eval_slots: int = Field(default=8, ge=1)
    """Scorings at a time on a node; `farm node --eval`."""
    room: int = Field(default=0, ge=0)
    """Rollouts that a node takes in all; 0 takes the sum of the three. `farm node --room`."""
    grace_s: float = Field(default=15.0, ge=0)
    """Seconds that what has begun may play on after SIGTERM; `farm node --grace`."""
    log_dir: Path | None = None
    """The folder that a node's workers log to; without one, they log to the node's standard error. `farm node
    --log-dir`."""
    log: Literal["text", "json"] = "text"
    """The form of the lines that the farm's processes log: `json` are objects with the ids that they are about."""
    pool: str = ""
    """The pool that a worker process serves; the node supervisor sets it."""
    lease_s: float = Field(default=60.0, gt=0)
    """Seconds a claim lives without renewal; renewed every third of it."""
    node_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a heartbeat after which a node counts as dead."""
    overdue_s: float = Field(default=120.0, gt=0)
    """Seconds beyond its limit that a stage gets to end by itself; then it is stopped, as a failed attempt."""
    stall_s: float = Field(default=60.0, gt=0)
    """A worker process whose event loop does not answer for so long hands back what it plays and ends. A stage that
    does not end for so long after it was stopped is abandoned."""
    tick_s: float = Field(default=0.5, gt=0)
    """The dispatcher's period when nothing wakes it."""
    resend_after_s: float = Field(default=3.0, gt=0, le=60)
    """Seconds until the message of a stage that is still queued is sent again; doubles each time, up to a minute."""
    retry_s: float = Field(default=2.0, ge=0)
    """Pause before a failed attempt is tried again; doubles each time, up to a minute."""
    max_open: int = Field(default=1_000_000, ge=1)
    """Rollouts of all batches that may be submitted and not have ended: a submit beyond it is refused, for now."""
    max_sandboxes: int = Field(default=1_000, ge=0)
    """Borrowed sandboxes that may be open at a time, those that wait for room included; more are refused, for now."""
    node_address: str = Field(default="127.0.0.1", max_length=255, pattern=r"^[A-Za-z0-9_.:\[\]-]+$")
    """A name or an IP address of this node at which the processes of the API reach it, for borrowed sandboxes: its run
    worker listens there, at a free port. The default serves APIs of this machine alone; `0.0.0.0` listens on all
    addresses and goes by the host's name."""
    prorl_timeout_s: float = Field(default=300.0, gt=0, le=86_400)
    """The `--timeout` of ProRL's server, where the API speaks its protocol: seconds that a play may take. A request
    waits for twice that and 10 s more."""
    keep_trajectories_days: float = Field(default=90.0, ge=0)
    """Days, from the end of a batch, for which its trajectories are kept: model calls, training rows, artefacts, files,
    attempts, task archives. Batches that are pinned, or that somebody or their training run still consumes, are kept
    longer. 0 keeps them for ever."""
    keep_rewards_days: float = Field(default=0.0, ge=0)
    """Days, from the end of a batch, for which its rewards, counts and failures are kept; 0 keeps them for ever. After
    that nothing is left of it, not even its idempotency key."""
    keep_log_days: float = Field(default=365.0, ge=0)
    """Days for which the audit log keeps an order, of which it has 200,000 at most; 0 keeps these."""
    keep_cache_days: float = Field(default=30.0, ge=0)
    """Days after its last use for which a node keeps an image, an environment, an archive or an agent's program in the
    cache; 0 keeps them for ever. What is in use, an alias names or a lock stands for is kept."""
    cache_mb: int = Field(default=0, ge=0)
    """The most megabytes of the cache: a node removes the least recently used beyond; 0 is no bound."""
    verl_tool_action_s: float = Field(default=10.0, gt=0, le=3600)
    """Seconds that an action of VeRL-Tool's protocol may take, where the API speaks that."""
    verl_tool_wait_s: float = Field(default=15.0, gt=0, le=3600)
    """Seconds that it waits for the sandbox of a new trajectory; with an action's less than its client waits."""
    verl_tool_lease_s: float = Field(default=1800.0, ge=5, le=86_400)
    """Seconds without an action after which a trajectory's sandbox ends."""
    audit_s: float = Field(default=30.0, ge=0)
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
    warm_pool: int = 8
    """Sandboxes of one sort that the warm pool keeps for queued rollouts; 0 switches it off."""
    warm_pool_total: int = 32
    """Sandboxes of the warm pool in all."""
    warm_pool_starts: int = 0
    """Most starts for the warm pool at a time; 0 takes half the cores. Starts that a rollout waits for go first."""
    warm_pool_idle_s: float = 60.0
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
    build_env: dict[str, str] = Field(default_factory=dict, repr=False)
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

    @field_validator(*_URLS, mode="before")
    @classmethod
    def _readable(cls, url: Any) -> Any:
        if isinstance(url, str) and (fault := url_fault(url)):
            raise PydanticCustomError("url", "{text}", {"text": fault})
        return url

    @property
    def secrets(self) -> set[str]:
        """The secrets among the values, and of the addresses in them."""
        names = type(self).model_fields
        secret = [getattr(self, name) for name, field in names.items() if not field.repr]
        return {*secret_settings(secret, [getattr(self, name) for name, field in names.items() if field.repr])}

    @property
    def database_url(self) -> str:
        return self.store_url or sqlite_url(self.home.absolute() / DATABASE_FILE)

    @property
    def cache(self) -> Path:
        return self.home.absolute() / "cache"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _FileSource(settings_cls, {})


@lru_cache(maxsize=1)
def settings() -> Settings:
    """Return the settings of this process, read once. Raises InvalidRequest naming the keys or variables at fault."""
    try:
        return Settings()
    except ValidationError as error:
        raise InvalidRequest.of(faults(error)) from None
    except SettingsError as error:
        # a variable that is to hold JSON and does not
        name = re.search(r'field "(\w+)"', str(error))
        raise InvalidRequest("is no JSON", field=f"{PREFIX}{name[1].upper()}" if name else PREFIX) from None


def faults(error: ValidationError) -> list[tuple[str, str]]:
    """Return (place, text) of each value that is wrong."""
    result = []
    for each in error.errors(include_url=False, include_input=False):
        key, place = ".".join(map(str, each["loc"])), place_of(str(each["loc"][0]))
        if each["type"] == "extra_forbidden":
            shown = key if key and key.isprintable() else repr(key)
            result.append((place, f"{shown} is no setting; {config_file.nearest(key, Settings.model_fields)}"))
        else:
            result.append((place, each["msg"] if place.startswith(PREFIX) else f"{key}: {each['msg']}"))
    return result


def variable_of(name: str) -> str | None:
    """Return the environment variable that gives a setting, None if there is none; its case does not count."""
    wanted = f"{PREFIX}{name}".upper()
    return next((each for each in os.environ if each.upper() == wanted), None)


def place_of(name: str) -> str:
    """Return what a setting's value comes from: a variable, a file with the line, or `default`."""
    if variable := variable_of(name):
        return variable.upper()
    path = config_file.path_in_use()
    file = ConfigFile(path) if path is not None else None
    return "default" if file is None or name not in file.values else file.place_of(name)
