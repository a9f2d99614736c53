"""Episodes of multi-step environments: GEM, SkyRL-gym, reasoning-gym, TextArena and others, or custom ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from pydantic import BaseModel

from farm.records.request import SandboxSpec
from farm.records.trajectory import Message
from workers.environments.instance import EnvironmentInstance
from workers.environments.step_rewards import StepRewardEvaluator
from workers.plugins.interfaces import Evaluator, Sandbox, Submission
from workers.plugins.roles import NO_MODELS, ChatModel


class EnvironmentHandler:
    """Runs step by step in a process of the environment; the reward is the sum of its steps' rewards."""

    data_source: ClassVar[str] = "environment"
    instance_type: ClassVar[type[BaseModel]] = EnvironmentInstance
    agent: ClassVar[str] = "environment"
    tools: ClassVar[Collection[str]] = ()

    def sandbox(self, instance: EnvironmentInstance) -> SandboxSpec | None:
        """Return None: the policy needs no sandbox; the agent shares the environment's sandbox between rollouts."""
        return None

    def messages(self, instance: EnvironmentInstance) -> list[Message]:
        """Return none: the messages come from the environment."""
        return []

    def roles(self, instance: EnvironmentInstance) -> Collection[str]:
        return instance.program.roles

    async def prepare(self, instance: EnvironmentInstance, sandbox: Sandbox) -> None:
        """Do nothing: there is nothing to stage."""

    async def collect(self, instance: EnvironmentInstance, sandbox: Sandbox | None, answer: str | None) -> Submission:
        return Submission(answer=answer)

    def evaluator(self, instance: EnvironmentInstance, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        return StepRewardEvaluator(instance.environment)
