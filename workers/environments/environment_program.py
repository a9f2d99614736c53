"""An installed environment as seen by the node: its class's declarations, its sandbox, and an instance's fields."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from farm.errors import HandlerError, NotFound
from farm.plugins import installed, load
from farm.records.request import SandboxLimits, SandboxSpec
from farm.records.sandbox_spec import Requirement
from farm.records.trajectory import Message
from workers.environments import computing_calls, environment, environment_server
from workers.environments.environment import Episode
from workers.plugins.plugin_faults import described

ENVIRONMENTS = "farm.environments"
FOLDER = "/opt/farm/environment"
"""The folder in the sandbox with the contract, the server and the plug-in's modules."""
SOCKET_FOLDER = "/run/farm"
SOCKET = "environment.sock"

_MEMORY_MB = 2048
_MOST_ROLLOUTS = 64
"""Number of rollouts for which a shared sandbox has memory."""
_VARIABLES = {
    # The order of sets of texts is visible in observations.
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": FOLDER,
    "PYTHONUNBUFFERED": "1",
    # A fork has none of the earlier threads.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Missing data is unavailable: fail at once instead of retrying downloads for minutes.
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class EnvironmentProgram:
    """The class attributes of an environment, validated; see `workers.environments.environment`."""

    name: str
    module: str
    qualname: str
    packages: tuple[str, ...] = ()
    without_dependencies: bool = False
    imports: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    image: str = "host"
    network: bool = False
    memory_mb: int = _MEMORY_MB
    env: tuple[tuple[str, str], ...] = ()
    shared: bool = True
    rewards: tuple[float, float] | None = None

    @classmethod
    def of(cls, name: str, kind: type[Any]) -> EnvironmentProgram:
        """Return a class's declarations. Raises TypeError or ValueError for invalid ones."""
        texts = {each: _texts(kind, each) for each in ("packages", "imports", "modules", "roles")}
        variables = dict(getattr(kind, "env", {}))
        rewards = getattr(kind, "rewards", None)
        network = bool(getattr(kind, "network", False))
        shared = bool(getattr(kind, "shared", not network))
        if network and shared:
            raise ValueError("network = True needs shared = False: a shared sandbox has no connections")
        program = cls(
            name,
            kind.__module__,
            kind.__qualname__,
            **texts,
            without_dependencies=bool(getattr(kind, "without_dependencies", False)),
            image=str(getattr(kind, "image", "host")),
            network=network,
            memory_mb=int(getattr(kind, "memory_mb", _MEMORY_MB)),
            env=tuple(sorted((str(key), str(value)) for key, value in variables.items())),
            shared=shared,
            rewards=None if rewards is None else reward_range(rewards),
        )
        program.spec()
        return program

    def spec(self, more_packages: Sequence[str] = ()) -> SandboxSpec:
        """Return its sandbox, with additional packages. Raises ValueError if they are not exact requirements."""
        n_rollouts = _MOST_ROLLOUTS if self.shared else 1
        return SandboxSpec(
            image=self.image,
            packages=tuple(dict.fromkeys((*self.packages, *more_packages))),
            without_dependencies=self.without_dependencies,
            network=self.network,
            workdir="/workspace",
            env={**_VARIABLES, **dict(self.env)},
            # The server keeps one rollout from taking the memory of the others.
            limits=SandboxLimits(memory_mb=max(4096, self.memory_mb * n_rollouts), n_processes=4096, cpu_s=1_000_000),
        )

    def sources(self) -> Mapping[str, Path]:
        """Return the files to copy into FOLDER, by their paths there. Raises HandlerError for a missing one."""
        own = (environment.__name__, computing_calls.__name__, environment_server.__name__)
        names = dict.fromkeys((*own, self.module, *self.modules))
        return {f"{name.replace('.', '/')}.py": _source(self.name, name) for name in names}


def _texts(kind: type[Any], attribute: str) -> tuple[str, ...]:
    value = getattr(kind, attribute, ())
    if isinstance(value, str) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{attribute} must be a tuple of texts, not {value!r:.100}")
    return tuple(value)


def reward_range(value: Any) -> tuple[float, float]:
    """Return the range of a step's reward, checked. Raises ValueError."""
    try:
        least, most = map(float, value)
    except (TypeError, ValueError):
        raise ValueError(f"rewards must be (LEAST, MOST), two numbers, not {value!r:.100}") from None
    if not (math.isfinite(least) and math.isfinite(most) and least <= most):
        raise ValueError(f"rewards must be two finite numbers, the smaller first, not {value!r:.100}")
    return least, most


def _source(name: str, module: str) -> Path:
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise HandlerError(f"environment {name}: module {module} has no source file to send along", retryable=False)
    if spec.submodule_search_locations:
        raise HandlerError(
            f"environment {name}: {module} is a package: name its modules one by one, or list a release of it in "
            "`packages`",
            retryable=False,
        )
    return Path(spec.origin)


@cache
def environment_program(name: str) -> EnvironmentProgram:
    """Return an installed environment by its name. Raises NotFound, or ValueError if it cannot be loaded."""
    try:
        kind = load(ENVIRONMENTS, name)
    except NotFound:
        raise
    except Exception as error:
        raise ValueError(f"environment {name} cannot be loaded on this node: {described(error)}") from error
    if not inspect.isclass(kind):
        raise ValueError(f"environment {name}: its entry point names a {type(kind).__name__}, not a class")
    try:
        return EnvironmentProgram.of(name, kind)
    except (TypeError, ValueError) as error:
        raise ValueError(f"environment {name}: {described(error)}") from error


def environment_names() -> list[str]:
    """Return the names of the installed environments."""
    return sorted(installed(ENVIRONMENTS))


def _installed(name: str) -> str:
    try:
        environment_program(name)
    except NotFound as error:
        raise ValueError(str(error)) from None
    return name


class EnvironmentInstance(BaseModel):
    """One episode. All samples of an instance share its seed: the same beginning, and the same replies to an action."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    environment: Annotated[str, AfterValidator(_installed)]
    """An entry point of `farm.environments`."""
    id: str = ""
    """The name of one of the package's environments, such as `game:GuessTheNumber-v0-easy`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    messages: tuple[Message, ...] = ()
    """A prompt, for environments that get theirs from the instance; others prepend it to their own."""
    packages: tuple[Requirement, ...] = ()
    """Packages in addition to the adapter's, such as the one that contains the environment."""
    rewards: tuple[float, float] | None = None
    """Minimum and maximum reward of one step, if they differ from the environment's declaration."""

    @field_validator("messages")
    @classmethod
    def _are_text(cls, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        for message in messages:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise ValueError("each needs a role and a content, both texts")
        return messages

    @field_validator("rewards")
    @classmethod
    def _is_range(cls, rewards: tuple[float, float] | None) -> tuple[float, float] | None:
        return None if rewards is None else reward_range(rewards)

    @property
    def program(self) -> EnvironmentProgram:
        """The environment's own settings."""
        return environment_program(self.environment)

    @property
    def reward_range(self) -> tuple[float, float] | None:
        """The range of a step's reward declared by the instance, else by its environment; None if by neither."""
        return self.rewards if self.rewards is not None else self.program.rewards

    @property
    def episode(self) -> Episode:
        return Episode(self.id, self.kwargs, self.messages, self.seed)
