"""The model of a Harbor `task.toml`, schemas 1.0 to 1.4, as Harbor 0.25 reads it (Apache-2.0; Harbor is not needed).

Unknown keys are ignored, as in Harbor; fields and defaults are Harbor's. Deprecated fields (`version`, `memory = "2G"`,
`storage`, `allow_internet`) are read as their successors. The source of the rules is `harbor/models/task/config.py`.
"""

from __future__ import annotations

import math
import re
import unicodedata
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    field_validator,
    model_validator,
)

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
MAIN_SERVICE = "main"
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_SERVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_STEP = re.compile(r'[^<>:"/\\|?*\x00-\x1f\x7f]+')
_DEVICE = re.compile(r"(?i:CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(?:COM|LPT)[1-9¹²³]) *")
_MOST_BYTES = 255
_BOOLEAN = TypeAdapter(bool)
_SIZES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


def _finite(value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{value} is not a positive number of seconds")
    return value


def _without_parents(path: str) -> str:
    if ".." in PurePosixPath(path).parts:
        raise ValueError(f"{path!r} may not contain '..'")
    return path


def _destination(path: str | None) -> str | None:
    if not path:
        return None
    if "\\" in path or path.startswith("/") or not PurePosixPath(path).parts or path.rstrip("/") == "manifest.json":
        raise ValueError(f"{path!r} is not a relative path of an artefact")
    return _without_parents(path)


def _service(name: str | None) -> str | None:
    if name is not None and not _SERVICE.fullmatch(name.strip()):
        raise ValueError(f"{name!r} is not a name of a service")
    return name and name.strip()


Seconds = Annotated[float, AfterValidator(_finite)]
User = str | int | None
"""A name or a number; None is the image's USER."""
NetworkMode = Literal["public", "no-network", "allowlist"]


class _Table(BaseModel):
    """A table of task.toml; unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Author(_Table):
    name: str
    email: str | None = None


class Package(_Table):
    """The table `[task]`."""

    name: str
    version: str | None = Field(default=None, min_length=1)
    description: str = ""
    authors: tuple[_Author, ...] = ()
    keywords: tuple[str, ...] = ()

    @field_validator("name")
    @classmethod
    def _of_organisation(cls, name: str) -> str:
        if not _PACKAGE.fullmatch(name) or ".." in name:
            raise ValueError(f"{name!r} is not of the form ORGANISATION/NAME")
        return name


class _Network(_Table):
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _hosts_of_a_list(self) -> Self:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError("allowed_hosts needs network_mode = 'allowlist'")
        return self


class _NetworkPhase(_Network):
    @model_validator(mode="after")
    def _hosts_of_a_mode(self) -> Self:
        if self.allowed_hosts is not None and self.network_mode is None:
            raise ValueError("allowed_hosts needs network_mode = 'allowlist'")
        return self


class AgentTable(_NetworkPhase):
    """The table `[agent]`."""

    timeout_sec: Seconds | None = None
    user: User = None


class HealthcheckTable(_Table):
    """A command that is repeated until it exits with 0: after a start, or before a step."""

    command: str = Field(min_length=1)
    interval_sec: float = Field(default=5.0, ge=0)
    timeout_sec: Seconds = 30.0
    start_period_sec: float = Field(default=0.0, ge=0)
    start_interval_sec: float = Field(default=5.0, ge=0)
    retries: int = Field(default=3, ge=1)


def _size_mb(table: dict[str, Any], name: str) -> None:
    """Read `memory = "2G"` as `memory_mb = 2048`; raise ValueError if both are given and differ."""
    text = table.pop(name, None)
    if not isinstance(text, str):
        return
    number, unit = text.strip()[:-1], text.strip()[-1:].upper()
    if unit not in _SIZES:
        raise ValueError(f"{name} = {text!r} has no unit: write '1G' or '512M'")
    amount = float(number) * _SIZES[unit]
    if not math.isfinite(amount):
        raise ValueError(f"{name} = {text!r} is not a size")
    size = int(amount)
    if table.setdefault(f"{name}_mb", size) != size:
        raise ValueError(f"{name} = {text!r} and {name}_mb = {table[f'{name}_mb']} differ")


class EnvironmentTable(_Network):
    """The table `[environment]`, or that of a separate verifier."""

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: Annotated[
        Literal["linux", "windows"], BeforeValidator(lambda os: os.lower() if isinstance(os, str) else os)
    ] = "linux"
    cpus: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: int | None = None
    gpu_types: tuple[str, ...] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: tuple[dict[str, Any], ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: HealthcheckTable | None = None
    workdir: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_old_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        table = dict(given)
        _size_mb(table, "memory")
        _size_mb(table, "storage")
        internet = table.pop("allow_internet", None)
        if internet is not None:
            public = _BOOLEAN.validate_python(internet)
            if "network_mode" not in table and table.get("allowed_hosts") is None:
                table["network_mode"] = "public" if public else "no-network"
        return table


class CollectHook(_Table):
    """A command that runs after the agent ended, before artefacts are taken."""

    command: str = Field(min_length=1)
    service: Annotated[str, AfterValidator(_service)] = MAIN_SERVICE
    timeout_sec: Seconds = 60.0
    user: User = None


class ArtefactEntry(_Table):
    """A file or folder that is kept and visible to a separate verifier. `exclude` are patterns of names or paths."""

    source: Annotated[str, AfterValidator(_without_parents), Field(min_length=1)]
    destination: Annotated[str | None, AfterValidator(_destination)] = None
    exclude: tuple[str, ...] = ()
    service: Annotated[str | None, AfterValidator(_service)] = None

    @model_validator(mode="after")
    def _of_a_service(self) -> Self:
        if self.service not in (None, MAIN_SERVICE) and not re.match(r"/|[A-Za-z]:[/\\]", self.source):
            raise ValueError(f"{self.source!r} of the service {self.service} is not an absolute path")
        return self


def _entry(given: Any) -> Any:
    return {"source": given} if isinstance(given, str) else given


Artefacts = tuple[Annotated[ArtefactEntry, BeforeValidator(_entry)], ...]


class VerifierTable(_NetworkPhase):
    """The table `[verifier]`."""

    timeout_sec: Seconds = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    user: User = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: tuple[CollectHook, ...] = ()

    @model_validator(mode="after")
    def _of_one_mode(self) -> Self:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError("environment_mode = 'shared' and [verifier.environment] exclude each other")
        return self

    @property
    def mode(self) -> Literal["shared", "separate"] | None:
        """The mode given here, or implied by an environment; None without either."""
        return self.environment_mode or ("separate" if self.environment is not None else None)


class StepTable(_Table):
    """One of `[[steps]]`."""

    name: str
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthcheckTable | None = None
    artifacts: Artefacts = ()

    @field_validator("name")
    @classmethod
    def _of_a_folder(cls, name: str) -> str:
        is_portable = _STEP.fullmatch(name) and not _DEVICE.fullmatch(name.partition(".")[0])
        if not is_portable or not name.strip() or name.endswith((".", " ")) or len(name.encode()) > _MOST_BYTES:
            raise ValueError(f"{name!r} is not a name of a folder")
        return name


class SolutionTable(_Table):
    """The table `[solution]`."""

    env: dict[str, str] = Field(default_factory=dict)


class TaskConfig(_Table):
    """A whole `task.toml`. Raises pydantic's ValidationError where Harbor refuses it."""

    schema_version: str = SCHEMAS[-1]
    task: Package | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: tuple[StepTable, ...] = ()
    artifacts: Artefacts = ()

    @model_validator(mode="before")
    @classmethod
    def _of_old_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and "version" in values:
            values = {"schema_version": values["version"], **values}
        return values

    @field_validator("steps")
    @classmethod
    def _of_different_names(cls, steps: tuple[StepTable, ...]) -> tuple[StepTable, ...]:
        names = [unicodedata.normalize("NFC", step.name).casefold() for step in steps]
        if len(set(names)) < len(names):
            raise ValueError("two steps have the same name")
        return steps

    def mode(self, step: StepTable | None = None) -> Literal["shared", "separate"]:
        """Return how a step is verified: as the step says, else as the task says, else shared."""
        return (step.verifier.mode if step else None) or self.verifier.mode or "shared"

    def verifier_environment(self, step: StepTable | None = None) -> EnvironmentTable:
        """Return the table of a separate verifier: the step's, else the task's verifier's, else the environment's."""
        return (step.verifier.environment if step else None) or self.verifier.environment or self.environment
