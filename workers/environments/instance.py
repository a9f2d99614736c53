"""The fields of an instance for a multi-step environment."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from farm.errors import NotFound
from farm.records.sandbox_spec import Requirement
from farm.records.trajectory import Message
from workers.environments.environment import Episode
from workers.environments.environment_program import EnvironmentProgram, environment_program, reward_range


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
