"""Episodes of multi-step environments: GEM, SkyRL-gym, reasoning-gym, TextArena and others, or custom ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from pydantic import BaseModel

from farm.records.request import SandboxSpec
from farm.records.trajectory import Message
from workers.environments.environment_program import EnvironmentInstance
from workers.environments.step_rewards import StepRewardEvaluator
from workers.plugins.handler import Handler
from workers.plugins.interfaces import NO_MODELS, ChatModel, Evaluator


class EnvironmentHandler(Handler[EnvironmentInstance]):
    """Runs step by step in a process of the environment; the reward is the sum of its steps' rewards."""

    data_source: ClassVar[str] = "environment"
    instance_type: ClassVar[type[BaseModel]] = EnvironmentInstance
    agent: ClassVar[str] = "environment"

    def sandbox(self) -> SandboxSpec | None:
        """Return None: the policy needs no sandbox; the agent shares the environment's sandbox between rollouts."""
        return None

    def messages(self) -> list[Message]:
        """Return none: the messages come from the environment."""
        return []

    def roles(self) -> Collection[str]:
        return self.instance.program.roles

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        return StepRewardEvaluator(self.instance.environment)
