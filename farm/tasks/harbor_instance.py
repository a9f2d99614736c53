"""One Harbor task as the fields of an instance: its `task.toml`, its instructions, and the list of its files.

The files themselves are in the task's archive; the instance has its digest. Requirements that sandboxes cannot meet are
refused at submit, by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from farm.records.task_needs import TaskNeeds
from farm.tasks.harbor_config import (
    MAIN_SERVICE,
    SCHEMAS,
    EnvironmentTable,
    HealthcheckTable,
    NetworkMode,
    StepTable,
    TaskConfig,
)

DATA_SOURCE = "harbor"
DOCKERFILE = "environment/Dockerfile"
COMPOSE = "docker-compose.yaml"
TEST = "test.sh"
Phase = Literal["init", "run", "eval"]
PHASES: tuple[Phase, ...] = ("init", "run", "eval")
_PUBLIC: NetworkMode = "public"


@dataclass(frozen=True, slots=True)
class VerifierImage:
    """The image of a verifier: a name, or a folder in the task's archive; both if the folder has a Dockerfile, too."""

    name: str = ""
    folder: str = ""


class HarborInstance(BaseModel):
    """The fields of the data source `harbor`. `farm submit DIR` creates them from a folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=200)
    task: TaskConfig
    instructions: tuple[str, ...] = Field(min_length=1)
    """The policy's messages: one, or one for each step."""
    files: tuple[str, ...] = ()
    """The paths in the archive that affect the run, such as environment/Dockerfile and the scripts."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of a compose file, in addition to those of task.toml."""
    entrypoint: tuple[str, ...] = ()
    """The entrypoint in a compose file; empty: the image's own."""
    command: tuple[str, ...] = ()
    """The command in a compose file, passed to the entrypoint; empty for one that only waits."""
    healthcheck: HealthcheckTable | Literal["none"] | None = None
    """The health check in a compose file; None: the image's own, if an entry program runs."""
    sidecars: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    privileged: bool = False
    other_needs: tuple[str, ...] = ()
    restore: Literal["programs", "nothing"] = "programs"
    """`programs`: before tests run in the tree that the policy left, programs of the image that they depend on are
    restored. `nothing`: for tasks about such a program."""
    footprint: tuple[Annotated[str, Field(pattern=r"^/[^/\x00][^\x00]*$", max_length=4096)], ...] = Field(
        (), max_length=100
    )
    """Absolute paths that the policy may change in any case, as the task's own solution changes them; a final `/` means
    everything in a folder. `farm tasks check` finds them, `TaskFolder.request` adds them here."""
    safe_path: bool = False
    """Run shared tests with PYTHONSAFEPATH=1, so that no module is found in their working directory; `farm tasks check`
    sets it if the tests pass then."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.task.schema_version not in SCHEMAS:
            raise ValueError(f"schema_version {self.task.schema_version!r} is not one of {', '.join(SCHEMAS)}")
        if len(self.instructions) != len(self.steps or (None,)):
            raise ValueError(f"{len(self.instructions)} instructions for {len(self.steps) or 1} steps")
        if not self.task.environment.docker_image and DOCKERFILE not in self.files:
            raise ValueError(f"needs an image: {DOCKERFILE} or [environment].docker_image")
        for step in self.steps or (None,):
            if not self.script(step, "tests", TEST) and self.verifier_image(step) is None:
                raise ValueError(f"there is no tests/{TEST}" + (f" for step {step.name}" if step else ""))
        return self

    @property
    def steps(self) -> tuple[StepTable, ...]:
        """The steps; none for a task with one instruction."""
        return self.task.steps

    @property
    def network_phases(self) -> tuple[Phase, ...]:
        """The phases in which the task has a network, in any of its steps."""
        modes = [self.network_modes(step) for step in self.steps or (None,)]
        return tuple(phase for phase in PHASES if any(each[phase] == _PUBLIC for each in modes))

    def network_modes(self, step: StepTable | None) -> dict[Phase, NetworkMode]:
        """Return the network of each phase of a step, as in Harbor: by default it is public."""
        task = self.task
        base = task.environment.network_mode or _PUBLIC
        verifier = base
        if task.mode(step) == "separate":
            verifier = task.verifier_environment(step).network_mode or _PUBLIC
        return {
            "init": base,
            "run": (step.agent.network_mode if step else None) or task.agent.network_mode or base,
            "eval": (step.verifier.network_mode if step else None) or task.verifier.network_mode or verifier,
        }

    @property
    def names_network(self) -> bool:
        """True if the task itself mentions the network."""
        task = self.task
        verifiers = [task.verifier, *(step.verifier for step in self.steps)]
        environments = [each.environment for each in verifiers if each.environment]
        tables = (task.environment, *environments, task.agent, *(step.agent for step in self.steps), *verifiers)
        return any(table.network_mode is not None for table in tables)

    def script(self, step: StepTable | None, folder: Literal["tests", "solution"], name: str) -> str:
        """Return the path of a script in the archive, preferably the step's own; empty without one."""
        paths = ([f"steps/{step.name}/{folder}/{name}"] if step else []) + [f"{folder}/{name}"]
        return next((path for path in paths if path in self.files), "")

    def verifier_image(self, step: StepTable | None) -> VerifierImage | None:
        """Return the own image, including the tests, of a separate verifier; None for the environment's.

        The step's precedes the task's, and an image's name precedes a Dockerfile.
        """
        if self.task.mode(step) != "separate":
            return None
        candidates = [(step.verifier.environment, f"steps/{step.name}/tests")] if step else []
        for table, folder in (*candidates, (self.task.verifier.environment, "tests")):
            built = f"{folder}/Dockerfile" in self.files
            if table is not None and table.docker_image:
                return VerifierImage(table.docker_image, folder if built else "")
            if built or f"{folder}/{COMPOSE}" in self.files:
                return VerifierImage(folder=folder)
        return None

    def agent_user(self, step: StepTable | None) -> str | int | None:
        """Return the user of the policy; None for the image's."""
        return step.agent.user if step and step.agent.user is not None else self.task.agent.user

    def verifier_user(self, step: StepTable | None) -> str | int | None:
        """Return the user of the tests; None for the image's."""
        return step.verifier.user if step and step.verifier.user is not None else self.task.verifier.user

    def verifier_s(self, step: StepTable | None) -> float:
        """Return the time limit of a step's tests in seconds; the default's for a step that states none."""
        return (step.verifier if step else self.task.verifier).timeout_sec

    def verifier_env(self, step: StepTable | None) -> dict[str, str]:
        """Return the variables of a step's tests, unexpanded."""
        return {**self.task.verifier.env, **(step.verifier.env if step else {})}


def needs_of(instance: HarborInstance) -> TaskNeeds:
    """Return everything that a task requires beyond an image, a network and limits."""
    tables = list(_environments(instance))
    return TaskNeeds(
        os=next((table.os for table in tables if table.os != "linux"), "linux"),
        sidecars=tuple(dict.fromkeys(_services(instance, tables))),
        gpus=max(0, *(table.gpus or 0 for table in tables)),
        accelerators=tuple(f"TPU {table.tpu.get('type', '')}".strip() for table in tables if table.tpu),
        privileged=instance.privileged,
        allowed_hosts=tuple(dict.fromkeys(_hosts(instance, tables))),
        host_mounts=instance.mounts,
        other=(*instance.other_needs, *_other(instance)),
    )


def _environments(instance: HarborInstance) -> Iterator[EnvironmentTable]:
    yield instance.task.environment
    for verifier in (instance.task.verifier, *(step.verifier for step in instance.steps)):
        if verifier.environment is not None:
            yield verifier.environment


def _services(instance: HarborInstance, tables: list[EnvironmentTable]) -> Iterator[str]:
    yield from instance.sidecars
    for table in tables:
        yield from (f"MCP server {server.get('name', '')}".strip() for server in table.mcp_servers)
    task, steps = instance.task, instance.steps
    for hook in (*task.verifier.collect, *(each for step in steps for each in step.verifier.collect)):
        if hook.service != MAIN_SERVICE:
            yield hook.service
    for entry in (*task.artifacts, *(each for step in steps for each in step.artifacts)):
        if entry.service not in (None, MAIN_SERVICE):
            yield str(entry.service)


def _hosts(instance: HarborInstance, tables: list[EnvironmentTable]) -> Iterator[str]:
    steps = instance.steps
    phases = (instance.task.agent, instance.task.verifier, *(each for s in steps for each in (s.agent, s.verifier)))
    for table in (*tables, *phases):
        if table.network_mode == "allowlist":
            yield from table.allowed_hosts or ()


def _other(instance: HarborInstance) -> Iterator[str]:
    """Yield requirements that change between steps: a sandbox has one user and one network throughout."""
    task = instance.task
    if any(step.agent.user not in (None, task.agent.user) for step in instance.steps):
        yield "another user in a step than in the task: a sandbox has one for the agent"
    if len({instance.network_modes(step)["run"] for step in instance.steps}) > 1:
        yield "another network in one step than in another: a sandbox has one for the agent"
    for step in instance.steps or (None,):
        own = instance.verifier_image(step)
        if own is not None and not own.name and f"{own.folder}/{COMPOSE}" in instance.files:
            yield f"the services of {own.folder}/{COMPOSE}: a verifier has no services next to it"
            break
