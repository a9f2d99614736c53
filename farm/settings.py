"""All settings of the farm: read from FARM_* variables, else from farm.toml (`farm.configuration.config_file`)."""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, PrivateAttr, ValidationError, field_validator
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
"""The settings that the farm's processes pass to each other; they cannot be set in farm.toml."""
_PATHS = ("api_ca",)
"""Settings that are paths although their type does not say so."""
_PATHS_BY_KEY: dict[str, Callable[[str], bool]] = {
    "build_files": bool,
    # most are names in a registry
    "swe_images": lambda text: text.startswith(("./", "../", "~/")),
}
"""Settings whose values are paths, with the test for the values that are."""
_URLS = ("store_url", "broker_url", "policy_url", "search", "webhook_url", "otel_endpoint")
_SQLITE = re.compile(r"^(sqlite(?:\+\w+)?:///)(?!/|:memory:|$|\?)")


def _scratch() -> Path:
    return Path(tempfile.gettempdir()) / f"farm-{os.getuid()}"


def _node() -> str:
    # several Slurm nodes can share a host name, e.g. in a test on one machine
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


class _FileSource(InitSettingsSource):
    """Values of farm.toml that neither variables nor the caller set; paths are relative to its folder."""

    def __call__(self) -> dict[str, Any]:
        path = config_file.path_in_use()
        if path is None:
            return {}
        file = ConfigFile(path)
        for name in SET_BY_FARM:
            if name in file.values:
                raise InvalidRequest(f"{name} is set by the farm itself: leave it out", field=file.location_of(name))
        names = self.settings_cls.model_fields
        values = {}
        for key, value in file.values.items():
            if key in self.current_state or key in config_file.OWN_TABLES:
                continue
            try:
                # the model refuses unknown names
                values[key] = _in_file(key, _kinds(names[key]) if key in names else set(), value, path.parent)
            except ValueError as error:
                raise InvalidRequest(f"{key}: {error}", field=file.location_of(key)) from None
        return values


def _kinds(field: FieldInfo) -> set[Any]:
    return {field.annotation, *get_args(field.annotation)}


def _in_file(name: str, kinds: set[Any], value: Any, folder: Path) -> Any:
    """Return the value of a setting in a file of that folder. Raises ValueError."""
    if isinstance(value, dict) and name in _PATHS_BY_KEY:
        inner = {key: each for key, each in value.items() if isinstance(each, str) and _PATHS_BY_KEY[name](each)}
        return value | {key: config_file.from_file(each, folder) for key, each in inner.items()}
    if isinstance(value, bool) and kinds & {int, float}:
        # Python would take it for 0 or 1
        return str(value).lower()
    if not isinstance(value, str) or not value:
        return value
    if Path in kinds or name in _PATHS:
        return config_file.from_file(value, folder)
    if name == "store_url":
        return _SQLITE.sub(lambda start: start.group(1) + sqlite_url(folder).removeprefix("sqlite:///") + "/", value)
    return value


class Settings(BaseSettings):
    """Set each field as `FARM_<NAME>`, or by its name in farm.toml; times in seconds."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", allow_inf_nan=False)

    home: Path = Field(default_factory=default_home)
    """Folder of an embedded farm's store and of the caches of images and environments. Nodes may share it, except with
    SQLite."""
    scratch: Path = Field(default_factory=_scratch)
    """Node-local disk for the writable layers of sandboxes; never a network file system."""
    store_url: str = ""
    """A database URL; for clients also the `http://HOST:8600` of an API. Empty: the embedded farm's SQLite under
    `home`."""
    broker_url: str = ""
    """A Redis URL, or `amqp://` for RabbitMQ. Empty: the embedded farm's own Redis."""
    api_key: str = Field(default="", repr=False)
    """The key that `farm api`, Flower and `farm metrics` require and that clients send. Empty: the one generated in
    `home`."""
    api_ca: str = ""
    """For clients: a PEM file of the authorities that may sign the API's certificate. Empty: the system's."""
    secret_key: str = Field(default="", repr=False)
    """The key that encrypts engines' keys and batches' secrets in the store; the same on all nodes. Empty: the one
    generated in `home`."""
    policy_url: str = ""
    """An OpenAI-compatible server to start the farm with, such as `http://127.0.0.1:8000/v1`."""
    policy_key: str = Field(default="none", repr=False)
    """The API key of that server."""
    policy_model: str = ""
    """The model of that server. Empty: the first that it lists."""
    policy_timeout_s: float = Field(default=600.0, gt=0)
    """Timeout of one request to an engine, in seconds."""
    engine_away_s: float = Field(default=60.0, gt=0)
    """Seconds that a call waits for the unavailable engine of its batch or instance; then the attempt fails."""

    search: str = ""
    """The engine of the `search` tool: `tavily`, `searxng:URL` or `http:URL`. Empty: no search."""
    search_key: str = Field(default="", repr=False)
    """The API key of that engine, if it needs one; used by the workers, never visible in a sandbox."""
    search_allowed: str = ""
    """Comma-separated domains: if set, search shows only pages of these and of their subdomains."""
    search_blocked: str = ""
    """Comma-separated domains whose pages search never shows, e.g. those with the answers."""

    webhook_url: str = Field(
        default="",
        pattern=r"^(https?://[A-Za-z0-9._:\[\]-]+([/?][^\s\x00-\x1f\x7f]*)?)?$",
        max_length=2000,
        repr=False,
    )
    """An address that gets a signed POST for each batch's end and each alarm. Empty: none."""
    webhook_hosts: str = ""
    """Comma-separated hosts, such as `hooks.lab.org` or `10.0.0.7:8080`, that keys without the scope `admin` may use
    for webhooks of their batches. Empty: none. The dispatching node calls them from inside its network."""
    webhook_secret: str = Field(default="", repr=False)
    """The HMAC key that signs webhooks, the same on all nodes and known to receivers. Without one, nothing is sent to
    `webhook_url`, and webhooks of batches are sent unsigned."""
    otel_endpoint: str = Field(default="", pattern=r"^(https?://\S+)?$")
    """The address of an OpenTelemetry collector, such as `http://127.0.0.1:4318`, that gets a trace of each rollout by
    OTLP over HTTP. Empty: none. Needs the packages of `rollout-farm[otel]`."""
    node: str = Field(default_factory=_node)
    """The name of this node, with one supervisor each. In a Slurm step the default is Slurm's name for the node."""
    init_slots: int = Field(default=4, ge=1)
    """Sandboxes that a node starts at a time; `farm node --init`."""
    run_slots: int = Field(default=64, ge=1)
    """Agents that run at a time on a node; `farm node --run`."""
    eval_slots: int = Field(default=8, ge=1)
    """Scorings at a time on a node; `farm node --eval`."""
    room: int = Field(default=0, ge=0)
    """Rollouts that a node holds in all; 0 is the sum of the three. `farm node --room`."""
    grace_s: float = Field(default=15.0, ge=0)
    """Seconds that running stages may continue after SIGTERM; `farm node --grace`."""
    log_dir: Path | None = None
    """The folder for the logs of a node's workers; without one, they log to the node's standard error. `farm node
    --log-dir`."""
    log: Literal["text", "json"] = "text"
    """The format of the farm's log lines: `json` are objects with the ids that the line refers to."""
    pool: str = ""
    """The pool of a worker process; set by the node supervisor."""
    lease_s: float = Field(default=60.0, gt=0)
    """Seconds until an unrenewed claim expires; claims are renewed every third of it."""
    node_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a heartbeat after which a node counts as dead."""
    overdue_s: float = Field(default=120.0, gt=0)
    """Seconds beyond its limit that a stage may take to end by itself; then it is stopped as a failed attempt."""
    stall_s: float = Field(default=60.0, gt=0)
    """A worker process whose event loop does not answer for this long releases its rollouts and exits. A stage that
    does not end for this long after it was stopped is abandoned."""
    tick_s: float = Field(default=0.5, gt=0)
    """The dispatcher's polling period in seconds, without notifications."""
    resend_after_s: float = Field(default=3.0, gt=0, le=60)
    """Seconds until the message of a stage that is still queued is sent again; doubles each time, up to a minute."""
    retry_s: float = Field(default=2.0, ge=0)
    """Seconds before a failed attempt is retried; doubles each time, up to a minute."""
    max_open: int = Field(default=1_000_000, ge=1)
    """Limit of unfinished rollouts of all batches; a submit beyond it is refused until some end."""
    max_sandboxes: int = Field(default=1_000, ge=0)
    """Limit of open borrowed sandboxes, including those that wait for room; more are refused until some end."""
    node_address: str = Field(default="127.0.0.1", max_length=255, pattern=r"^[A-Za-z0-9_.:\[\]-]+$")
    """A name or an IP address of this node that API processes can reach, for borrowed sandboxes: its run worker listens
    there, at a free port. The default serves only APIs on this machine; `0.0.0.0` listens on all addresses and is
    reached by the host's name."""
    prorl_timeout_s: float = Field(default=300.0, gt=0, le=86_400)
    """The `--timeout` of ProRL's server, where the API serves its protocol: seconds that a rollout may take. A request
    waits for twice that and 10 s more."""
    keep_trajectories_days: float = Field(default=90.0, ge=0)
    """Days after the end of a batch until its trajectories are removed: model calls, training rows, artefacts, files,
    attempts, task archives. Pinned batches, and batches still used by a consumer or their training run, are kept
    longer. 0: never."""
    keep_rewards_days: float = Field(default=0.0, ge=0)
    """Days after the end of a batch until its rewards, counts and failures are removed; 0: never. After that nothing is
    left of it, not even its idempotency key."""
    keep_log_days: float = Field(default=365.0, ge=0)
    """Days until an entry of the audit log is removed; 0: never. The log keeps at most 200,000 entries."""
    keep_cache_days: float = Field(default=30.0, ge=0)
    """Days after its last use until a node removes an image, an environment, an archive or an agent's program from the
    cache; 0: never. Entries in use, aliased or locked are kept."""
    cache_mb: int = Field(default=0, ge=0)
    """Limit of the cache in megabytes: a node removes the least recently used entries beyond it; 0: no limit."""
    verl_tool_action_s: float = Field(default=10.0, gt=0, le=3600)
    """Seconds that an action of VeRL-Tool's protocol may take, where the API serves it."""
    verl_tool_wait_s: float = Field(default=15.0, gt=0, le=3600)
    """Seconds to wait for the sandbox of a new trajectory; with an action's, less than its client waits."""
    verl_tool_lease_s: float = Field(default=1800.0, ge=5, le=86_400)
    """Seconds without an action after which a trajectory's sandbox ends."""
    audit_s: float = Field(default=30.0, ge=0)
    """Seconds between two audits by the leading dispatcher, each of one open batch in turn; 0: no audits."""
    sandbox_user: str = "nobody"
    """The user that sandboxes run as when the farm is started by root."""
    sandbox_ids: str = Field(default="", pattern=r"^([1-9]\d{0,9}:\d{1,10})?$")
    """User and group ids of the node, `FIRST:COUNT`; each sandbox gets one when the farm is started by root. Empty: the
    ids of `FARM_SANDBOX_USER` in `/etc/subuid` and `/etc/subgid`; without any, sandboxes share that user."""
    cgroup: Path | None = None
    """A control group in which the farm may create one for each sandbox, so that the kernel enforces their memory
    limits; without one, the farm measures. Version 2: a delegated group without processes, e.g. below a systemd unit
    with `Delegate=yes`, next to the farm's own processes. Version 1: a group of the memory controller."""
    sandbox: str = "auto"
    """The sandbox of instances that do not choose one: `auto`, `singularity` or `namespace`."""
    warm_pool: int = 8
    """Sandboxes of one kind that the warm pool keeps for queued rollouts; 0: no warm pool."""
    warm_pool_total: int = 32
    """Total of sandboxes in the warm pool."""
    warm_pool_starts: int = 0
    """Limit of concurrent starts for the warm pool; 0: half the cores. Starts that a rollout waits for go first."""
    warm_pool_idle_s: float = 60.0
    """Seconds that the warm pool keeps a sandbox that no queued rollout needs; the few last used, twice as long."""
    layer_idle_s: float = 300.0
    """Seconds that the prepared layer of an instance is kept after its last sample started."""
    artefacts_mb: float = 16.0
    """Limit of one rollout's artefacts, such as long outputs in full, in the store: megabytes, compressed."""
    layer_mb: float = Field(default=64.0, ge=0, le=1000)
    """Limit of the files that a rollout leaves in its sandbox and that the store keeps for repeated scoring, if its
    handler needs them: megabytes, packed. Larger ones are scored once, on the node of the rollout."""
    image_cache: Literal["scratch", "versioned", "lock"] = "versioned"
    """The rule for reusing a cached image. `scratch`: only if this farm built it since it started. `versioned`: if it
    was built from the same content by the same version of the runtime. `lock`: always, even if its source changed: an
    image name keeps its first content until `farm images build` locks it again.
    """
    image_builder: Literal["own", "buildah"] = "own"
    """The program that builds Dockerfiles: the farm's own, or `buildah` if installed."""
    build_network: bool = False
    """True: builds of Dockerfiles use the node's network, even if their tasks may not; see `farm images build`."""
    build_env: dict[str, str] = Field(default_factory=dict, repr=False)
    """Environment variables of image builds only, as JSON, e.g. mirrors: `{"PIP_INDEX_URL": "https://..."}`."""
    build_files: dict[str, str] = Field(default_factory=dict)
    """Files or folders of the node that builds see, read-only, as JSON from the path inside to the path outside:
    `{"/etc/pip.conf": "/srv/mirrors/pip.conf"}`."""
    swe_images: dict[str, str] = Field(default_factory=dict)
    """JSON: the template of image names on this node for each data set of SWE rows, such as
    `{"swe-bench": "/images/{id_1776}.sif"}`. Data sets without one use the names in their rows."""
    started_at: float | None = None
    """The farm's start time in seconds since 1970; the node supervisor sets it for its workers."""

    lifeline_fd: int | None = None
    """The inherited read end of a pipe that the node's supervisor holds: sandboxes end when it is closed."""

    _choices: dict[str, Any] = PrivateAttr(default_factory=dict)

    def of_choices(self, choices: Mapping[str, Any]) -> Self:
        """Record the values that the process chose itself, and return these settings."""
        self._choices = dict(choices)
        return self

    @property
    def choices(self) -> dict[str, Any]:
        """The values that this process chose itself (`choose`), by name."""
        return dict(self._choices)

    @property
    def chosen_variables(self) -> dict[str, str]:
        """The same as environment variables, for the programs that it starts; they read the same farm.toml."""
        texts = {
            name: json.dumps(each) if isinstance(each, dict) else str(each) for name, each in self._choices.items()
        }
        chosen = {f"{PREFIX}{name.upper()}": text for name, text in texts.items()}
        return config_file.pinned() | chosen

    @field_validator(*_URLS, mode="before")
    @classmethod
    def _readable(cls, url: Any) -> Any:
        if isinstance(url, str) and (fault := url_fault(url)):
            raise PydanticCustomError("url", "{text}", {"text": fault})
        return url

    @property
    def secrets(self) -> set[str]:
        """The secrets among the values, including passwords in URLs."""
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


_next_choices: dict[str, Any] = {}


@lru_cache(maxsize=1)
def settings() -> Settings:
    """Return the settings of this process, read once. Raises InvalidRequest naming the keys or variables at fault."""
    choices = dict(_next_choices)
    _next_choices.clear()
    try:
        return Settings(**choices).of_choices(choices)
    except ValidationError as error:
        raise InvalidRequest.of(faults(error)) from None
    except SettingsError as error:
        # a variable whose value must be JSON
        name = re.search(r'field "(\w+)"', str(error))
        raise InvalidRequest("must be JSON", field=f"{PREFIX}{name[1].upper()}" if name else PREFIX) from None


def choose(**values: Any) -> Settings:
    """Replace values in the settings of this process, until they are read again. Raises InvalidRequest.

    Programs that it starts get them as `settings().chosen_variables`.
    """
    choices = settings().choices | values
    settings.cache_clear()
    _next_choices.update(choices)
    return settings()


def faults(error: ValidationError) -> list[tuple[str, str]]:
    """Return (source, text) for each invalid value."""
    complaints = []
    for each in error.errors(include_url=False, include_input=False):
        key, source = ".".join(map(str, each["loc"])), source_of(str(each["loc"][0]))
        if each["type"] == "extra_forbidden":
            shown = key if key and key.isprintable() else repr(key)
            complaints.append((source, f"{shown} is not a setting; {config_file.nearest(key, Settings.model_fields)}"))
        else:
            complaints.append((source, each["msg"] if source.startswith(PREFIX) else f"{key}: {each['msg']}"))
    return complaints


def variable_of(name: str) -> str | None:
    """Return the environment variable that sets a setting, whatever its case; None without one."""
    wanted = f"{PREFIX}{name}".upper()
    return next((each for each in os.environ if each.upper() == wanted), None)


def source_of(name: str) -> str:
    """Return the source of a setting's value: a variable, a line of a file, or `default`."""
    if variable := variable_of(name):
        return variable.upper()
    path = config_file.path_in_use()
    file = ConfigFile(path) if path is not None else None
    return "default" if file is None or name not in file.values else file.location_of(name)
