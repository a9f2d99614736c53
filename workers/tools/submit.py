"""The `submit` tool: ends the rollout."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, Field

from workers.plugins.interfaces import Observation, Sandbox
from workers.tools import Arguments


class SubmitArguments(Arguments):
    answer: str | None = Field(default=None, description="The final answer, if the problem asks for one.")


class SubmitTool:
    """A `workers.plugins.interfaces.Tool`. Needs no sandbox."""

    name: ClassVar[str] = "submit"
    description: ClassVar[str] = "Hand in the work and end. Call it once, when the problem is solved."
    arguments: ClassVar[type[BaseModel]] = SubmitArguments

    def __init__(self, sandbox: Sandbox | None) -> None:
        """Accept a sandbox like all tools; the handler collects the submission from it."""

    async def call(self, arguments: SubmitArguments, timeout_s: float) -> Observation:
        return Observation("Submitted.", done=True, answer=arguments.answer)

    async def close(self) -> None:
        """Do nothing: nothing is held."""
