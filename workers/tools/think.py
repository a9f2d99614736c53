"""The `think` tool: reasoning between two actions. It changes nothing; the thought stays in the conversation."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, Field

from workers.plugins.interfaces import Observation, Sandbox
from workers.tools import Arguments


class ThinkArguments(Arguments):
    thought: str = Field(description="The thought.")


class ThinkTool:
    """A `workers.plugins.interfaces.Tool`. Needs no sandbox."""

    name: ClassVar[str] = "think"
    description: ClassVar[str] = (
        "Think about what is known and what to do next. It is only written down: nothing is run, looked up or changed."
    )
    arguments: ClassVar[type[BaseModel]] = ThinkArguments

    def __init__(self, sandbox: Sandbox | None) -> None:
        """Accept a sandbox like all tools; the thought is recorded with its call."""

    async def call(self, arguments: ThinkArguments, timeout_s: float) -> Observation:
        return Observation("Your thought has been logged.")

    async def close(self) -> None:
        """Do nothing: nothing is held."""
