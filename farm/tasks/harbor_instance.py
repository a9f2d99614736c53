"""One Harbor task as the fields of an instance: its `task.toml`, its instructions, and which of its files are there.

The files themselves are in the task's archive, which the instance names by its digest.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from farm.tasks.harbor_config import SCHEMAS, StepTable, TaskConfig

DATA_SOURCE = "harbor"
DOCKERFILE = "environment/Dockerfile"
TEST = "test.sh"
_PUBLIC = "public"
Phase = Literal["init", "run", "eval"]


class HarborInstance(BaseModel):
    """The fields of the data source `harbor`. `farm submit DIR` writes them from a folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=200)
    task: TaskConfig
    instructions: tuple[str, ...] = Field(min_length=1)
    """The policy's messages: one, or one of each step."""
    files: tuple[str, ...] = ()
    """The paths in it that decide how it is played, such as environment/Dockerfile and the scripts."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables beside those of task.toml, of a compose file."""
    sidecars: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    privileged: bool = False
    other_needs: tuple[str, ...] = ()
    restore: Literal["programs", "nothing"] = "programs"
    """`programs`: before it is scored in the tree that the policy left, programs of the image that tests stand on have
    their own form again. `nothing`: for tasks that are about such a program."""
    footprint: tuple[Annotated[str, Field(pattern=r"^/[^/\x00][^\x00]*$", max_length=4096)], ...] = Field(
        (), max_length=100
    )
    """Absolute paths that the policy may change whatever they are, as the task's own solution changes them; a `/` at
    the end stands for all below a folder. `farm tasks check` finds them, `TaskFolder.request` puts them here."""
    safe_path: bool = False
    """True to run shared tests with PYTHONSAFEPATH=1, so that no module is found where they run; `farm tasks check`
    says so of tests that pass then."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.task.schema_version not in SCHEMAS:
            raise ValueError(f"schema_version {self.task.schema_version!r} is not one of {', '.join(SCHEMAS)}")
        if len(self.instructions) != len(self.steps or (None,)):
            raise ValueError(f"{len(self.instructions)} instructions for {len(self.steps) or 1} steps")
        if not self.task.environment.docker_image and DOCKERFILE not in self.files:
            raise ValueError(f"neither {DOCKERFILE} nor [environment].docker_image says what it is played in")
        for step in self.steps or (None,):
            if not self.script(step, "tests", TEST) and not self.has_own_tests(step):
                raise ValueError(f"there is no tests/{TEST}" + (f" for step {step.name}" if step else ""))
        return self

    @property
    def steps(self) -> tuple[StepTable, ...]:
        """The steps; none of a task that has one instruction."""
        return self.task.steps

    @property
    def network_phases(self) -> tuple[Phase, ...]:
        """The phases in which the task has a network, as in Harbor: all of a task that says nothing of it."""
        task = self.task
        base = task.environment.network_mode or _PUBLIC
        verifier = (task.verifier.environment.network_mode or _PUBLIC) if task.verifier.environment else base
        modes: dict[Phase, str] = {
            "init": base,
            "run": task.agent.network_mode or base,
            "eval": task.verifier.network_mode or verifier,
        }
        return tuple(phase for phase, mode in modes.items() if mode == _PUBLIC)

    @property
    def names_network(self) -> bool:
        """True if the task itself says something of the network."""
        task = self.task
        tables = (task.environment, task.agent, task.verifier, task.verifier.environment)
        return any(table is not None and table.network_mode is not None for table in tables)

    def script(self, step: StepTable | None, folder: Literal["tests", "solution"], name: str) -> str:
        """Return the path of a script in the archive, the step's own first; empty if there is none."""
        places = ([f"steps/{step.name}/{folder}/{name}"] if step else []) + [f"{folder}/{name}"]
        return next((place for place in places if place in self.files), "")

    def verifier_context(self, step: StepTable | None) -> str:
        """Return the folder with the Dockerfile of a separate verifier; empty if it has none of its own."""
        places = ([f"steps/{step.name}/tests"] if step else []) + ["tests"]
        return next((place for place in places if f"{place}/Dockerfile" in self.files), "")

    def has_own_tests(self, step: StepTable | None) -> bool:
        """Return whether the image of a separate verifier brings its tests along, so that none are put there."""
        if self.task.mode(step) != "separate":
            return False
        own = [table.environment for table in (step.verifier if step else None, self.task.verifier) if table]
        return bool(self.verifier_context(step)) or any(table and table.docker_image for table in own)

    def agent_user(self, step: StepTable | None) -> str | int | None:
        """Return the user that the policy acts as; None for the image's."""
        return step.agent.user if step and step.agent.user is not None else self.task.agent.user

    def verifier_user(self, step: StepTable | None) -> str | int | None:
        """Return the user that tests run as; None for the image's."""
        return step.verifier.user if step and step.verifier.user is not None else self.task.verifier.user

    def verifier_s(self, step: StepTable | None) -> float:
        """Return the seconds that the tests of a step may take."""
        stated = step is not None and "timeout_sec" in step.verifier.model_fields_set
        return step.verifier.timeout_sec if step and stated else self.task.verifier.timeout_sec

    def verifier_env(self, step: StepTable | None) -> dict[str, str]:
        """Return the variables of the tests of a step, as they are written."""
        return {**self.task.verifier.env, **(step.verifier.env if step else {})}
